"""A trainer on gloo ranks that grows from one to two between steps and shrinks again.

`python -m bench.sim.allocation.elastic_ranks MODEL OUT SIZES`: a rank, with the environment of
torchrun; SIZES are the replicas of each step, such as 1,1,2,2. Rank 0 leaves the last weights
and the seconds of each change.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainer.config import TrainerConfig
    from trainer.data.token_sequence import TokenSequence

_SIZES = (1, 1, 2, 2, 2, 1, 1)
_GROUPS, _GROUP_SIZE, _TOKENS, _PROMPT = 4, 4, 48, 8
_SECONDS = 600.0


def elastic_ranks(model: Path, scratch: Path) -> dict[str, float]:
    """Greatest differences of weights, relative to their greatest: to one world, and repeated."""
    whole = _run(model, scratch / "whole", [1] * len(_SIZES))
    first, again = (_run(model, scratch / name, _SIZES) for name in ("first", "again"))
    start = _run(model, scratch / "start", [1])
    seconds = json.loads((scratch / "first" / "seconds.json").read_text())
    return {
        "ranks_difference_to_one_world": _difference(first, whole),
        "ranks_difference_repeated": _difference(first, again),
        "ranks_weights_moved": _difference(whole, start),
        "ranks_seconds_to_grow": seconds["grow"],
        "ranks_seconds_to_shrink": seconds["shrink"],
    }


def _difference(one: Path, other: Path) -> float:
    from safetensors.numpy import load_file

    first, second = load_file(one), load_file(other)
    most = max(float(np.abs(first[name] - second[name]).max()) for name in first)
    return most / max(float(np.abs(each).max()) for each in second.values())


def _run(model: Path, out: Path, sizes: Sequence[int]) -> Path:
    """Steps on as many ranks as are needed; the file of the weights."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    out.mkdir(parents=True)
    # Here, as under torchrun, so that no rank ends the store of the others.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(max(sizes)),
        "OMP_NUM_THREADS": "1",
    }
    given = [str(model), str(out), ",".join(map(str, sizes))]
    command = [sys.executable, "-m", "bench.sim.allocation.elastic_ranks", *given]
    ranks = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(max(sizes))
    ]
    try:
        codes = [rank.wait(_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise RuntimeError(f"ranks of {out.name} ended with {codes}")
    return out / "weights.safetensors"


def _main(model: Path, out: Path, sizes: Sequence[int]) -> None:
    from trainer.config import TrainerConfig
    from trainer.ranks.end_process import end_process

    settings = {
        "run_id": "elastic",
        "model": model,
        "checkpoint": {"folder": out / "checkpoints"},
        "dtype": "float64",
        "replicas": max(sizes),
        "batch": {"micro_batch_tokens": 2 * _TOKENS},
        "optimizer": {"learning_rate": 1e-3},
        "num_steps": len(sizes),
    }
    config = TrainerConfig.model_validate(settings)
    if os.environ["RANK"] == "0":
        asyncio.run(_lead(config, out, sizes))
    else:
        _follow(config)
    end_process(0)


def _follow(config: TrainerConfig) -> None:
    from trainer.ranks.command_channel import worker_loop
    from trainer.ranks.process_group import join
    from trainer.ranks.worker import Worker

    ranks = join(config)
    worker_loop(ranks, Worker(config, ranks.store), _SECONDS)


async def _lead(config: TrainerConfig, out: Path, sizes: Sequence[int]) -> None:
    from trainer.ranks.rank_group import RankGroup
    from trainer.step.step_runner import StepRunner

    ranks, seconds = RankGroup(), dict[str, float]()
    await ranks.start(config)
    runner = StepRunner(config, ranks)
    for step, size in enumerate(sizes, 1):
        if size != ranks.replicas:
            kind, began = ("grow" if size > ranks.replicas else "shrink"), time.monotonic()
            await ranks.resize(size)
            seconds[kind] = time.monotonic() - began
        await _step(runner, step)
    await _save(ranks, out)
    (out / "seconds.json").write_text(json.dumps(seconds))
    await ranks.stop()


async def _step(runner: object, step: int) -> None:
    from trainer.data.gradient_chunks import GradientChunk
    from trainer.step.step_runner import StepRunner
    from trainer.tracking.step_record import StepRecord

    assert isinstance(runner, StepRunner)
    record = StepRecord(step, 1)
    await runner.accumulate(GradientChunk(sequences=_sequences(step), last=True), record)
    await runner.optimize(record)


async def _save(ranks: object, out: Path) -> None:
    """The weights, whole, from the state of all ranks."""
    from safetensors.numpy import load_file, save_file

    from trainer.ranks.rank_group import RankGroup

    assert isinstance(ranks, RankGroup)
    folder = out / "state"
    folder.mkdir()
    await ranks.save(folder)
    await ranks.wait_written(folder)
    shards = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    names = sorted(name for name in shards[0] if name.startswith("parameter."))
    whole = {name: np.concatenate([each[name] for each in shards]) for name in names}
    save_file(whole, out / "weights.safetensors")


def _sequences(step: int) -> list[TokenSequence]:
    """Groups whose members differ in length and reward."""
    rng = np.random.default_rng(step)
    names = [(group, member) for group in range(_GROUPS) for member in range(_GROUP_SIZE)]
    return [_sequence(rng, f"g{step}-{group}", member) for group, member in names]


def _sequence(rng: np.random.Generator, group: str, member: int) -> TokenSequence:
    from trainer.data.token_sequence import TokenSequence

    length = int(rng.integers(_TOKENS // 2, _TOKENS))
    mask = np.arange(length) >= _PROMPT
    return TokenSequence(
        sample_id=f"{group}-{member}",
        rollout_id=f"{group}-{member}",
        group_id=group,
        token_ids_T=rng.integers(0, 2, length).astype(np.int32),
        behaviour_logprobs_T=np.where(mask, -6.9, 0.0).astype(np.float32),
        reference_logprobs_T=np.zeros(length, np.float32),
        loss_mask_T=mask,
        weight_versions_T=mask.astype(np.int64),
        temperatures_T=np.ones(length, np.float32),
        rewards={"reward": float(rng.random())},
    )


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]), [int(each) for each in sys.argv[3].split(",")])
