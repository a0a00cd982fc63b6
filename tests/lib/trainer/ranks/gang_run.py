"""A gang without services.

`torchrun -m tests.lib.trainer.ranks.gang_run '{"config": {...}, ...}'`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch.distributed as dist
from safetensors.torch import save_file

from services.lib.routed_experts import RoutingShape
from tests.lib.trainer.ranks.published_weights import write_snapshot, written_tensors
from tests.lib.trainer.support import make_samples, trainer_config
from trainer.checkpoint import checkpoint_files
from trainer.commands import Exit, Load, Optimize, Release, Restore, Save, Written
from trainer.config import TrainerConfig
from trainer.data.gradient_chunks import GradientChunk
from trainer.data.token_sequence import TokenSequence, sequence
from trainer.pipeline import schedule
from trainer.publish import bucket_plan
from trainer.ranks.command_channel import Rank0, worker_loop
from trainer.ranks.process_group import join
from trainer.ranks.rank_group import RankGroup
from trainer.ranks.worker import Worker
from trainer.step.chunk_commands import ChunkCommands
from trainer.step.step_runner import StepRunner
from trainer.tracking.step_record import StepRecord

schedule._PLAN_SECONDS = 0.02  # of models as small as these

T = TypeVar("T")


def train(
    rank0: Rank0, config: TrainerConfig, step: int, parts: Sequence[Sequence[int]] = ((0, 1, 2),)
) -> dict[str, float]:
    """One step on the samples that the step's number seeds, in parts of these groups.

    Between the parts of a step device state is moved out and in.
    """
    sequences = [sequence(sample) for sample in make_samples(step)]
    shape = rank0.worker.backend.routing
    if config.batch.replay_routed_experts and isinstance(shape, RoutingShape):
        sequences = [with_experts(each, shape) for each in sequences]
    if config.algorithm.several_updates:
        return asyncio.run(update_often(rank0, config, step, sequences))
    first = 0
    for number, groups in enumerate(parts):
        if number:
            rank0.do(Release())
            rank0.do(Restore())
        names = [f"g{step}-{group}" for group in groups]
        part = [s for name in names for s in sequences if s.group_id == name]
        accumulate(rank0, config, step, part, first)
        first += len(part)
    return rank0.do(Optimize(step=step, rows="send"))[0]


def with_experts(item: TokenSequence, shape: RoutingShape) -> TokenSequence:
    """Other experts than a model would choose, for half of the tokens; equal for equal prefixes."""
    experts = shape.empty(len(item.token_ids_T))
    for index in range(1, len(experts)):
        rng = np.random.default_rng(zlib.crc32(item.token_ids_T[:index].tobytes()))
        if rng.random() < 0.5:
            order = rng.random((shape.num_layers, shape.num_experts)).argsort(-1)
            experts[index] = order[:, : shape.num_chosen]
    return replace(item, routed_experts_TLK=experts)


class Ranks(RankGroup):
    """Commands in this thread."""

    def __init__(self, rank0: Rank0) -> None:
        super().__init__()
        self._rank0 = rank0

    async def _run(self, work: Callable[[], T]) -> T:
        return work()


async def update_often(
    rank0: Rank0, config: TrainerConfig, step: int, sequences: Sequence[TokenSequence]
) -> dict[str, float]:
    """A step of several updates."""
    runner, record = StepRunner(config, Ranks(rank0)), StepRecord(step, max(step, 2))
    await runner.accumulate(GradientChunk(sequences=sequences, last=True), record)
    await runner.optimize(record, sends_rows=True)
    return {name: value for name, value in record.numbers().items() if "seconds" not in name}


def received_rows(rank0: Rank0, step: int) -> dict[int, list[list[float]]]:
    """By number of a sequence the values of its trained tokens, which the ranks sent."""
    rows = asyncio.run(Ranks(rank0).trained_rows(step, 20.0))
    return {
        number: [[] if column is None else column.tolist() for column in values]
        for number, values in sorted(rows.items())
    }


def accumulate(
    rank0: Rank0,
    config: TrainerConfig,
    step: int,
    sequences: Sequence[TokenSequence],
    first: int = 0,
) -> None:
    """Add the gradient of some groups, the first sequence of which has this number."""
    chunks = ChunkCommands(config, rank0.world_size, packed=rank0.worker.backend.packed)
    base = max(step, 2)  # of the newest tokens
    rank0.do_each(chunks.of(sequences, base, first_number=first))


def lead(rank0: Rank0, config: TrainerConfig, job: dict[str, object], out: Path) -> None:
    """Do the job, then those that follow it, on the same ranks."""
    perform(rank0, config, job, out)
    jobs: list[dict[str, object]] = job.get("then", [])  # type: ignore[assignment]
    for then in jobs:
        perform(rank0, config, then, Path(str(then["out"])))
    rank0.do(Exit())


def perform(rank0: Rank0, config: TrainerConfig, job: dict[str, object], out: Path) -> None:
    """Load, train, suspend and save according to the job; write losses and weights to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    if "load" in job:
        rank0.do(Load(folder=str(job["load"])))
    metrics, rows = [], []
    for step in job["steps"]:  # type: ignore[attr-defined]
        if step == job.get("suspend_before"):
            rank0.do(Release())
            rank0.do(Restore())
        parts: list[list[int]] = job.get("parts", [[0, 1, 2]])  # type: ignore[assignment]
        metrics.append(train(rank0, config, step, parts))
        rows.append(received_rows(rank0, step))
        if step == job.get("save_after"):
            partial = checkpoint_files.begin(config.checkpoint.folder, step)
            rank0.do(Save(folder=str(partial)))
            while not all(answer["written"] for answer in rank0.do(Written(folder=str(partial)))):
                pass
            state = checkpoint_files.Checkpoint(
                run_id=config.run_id,
                step=step,
                weight_version=step,
                world_size=rank0.world_size,
                settings=config.reproducibility_settings(),
                base=config.base(),
                record={},
            )
            checkpoint_files.complete(partial, state, keep=1)
    asyncio.run(write_weights(rank0, out))
    (out / "metrics.json").write_text(json.dumps(metrics))
    (out / "rows.json").write_text(json.dumps(rows))


async def write_weights(rank0: Rank0, out: Path) -> None:
    """Write what the ranks publish into one file."""
    written = await write_snapshot(await Ranks(rank0).snapshot(), out / "published")
    (out / "written.json").write_text(json.dumps([asdict(each) for each in written]))
    save_file(written_tensors(out / "published"), out / "weights.safetensors")


def run_rank(job: dict[str, object]) -> None:
    """Run this process's rank of the job; `bucket_bytes` bounds the files that it publishes."""
    out = Path(str(job["out"]))
    bucket_plan._MAX_BYTES = int(str(job.get("bucket_bytes", bucket_plan._MAX_BYTES)))
    values = {**job["config"], "model": Path(str(job["model"]))}  # type: ignore[dict-item]
    config = trainer_config(run_id="r", checkpoint__folder=out / "checkpoints", **values)
    ranks = join(config)
    try:
        worker = Worker(config, ranks.store)
        if ranks.rank == 0:
            lead(Rank0(ranks, worker), config, job, out)
        else:
            worker_loop(ranks, worker, grace_seconds=1.0)
    except BaseException:
        dist.destroy_process_group()
        raise


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[1]))
