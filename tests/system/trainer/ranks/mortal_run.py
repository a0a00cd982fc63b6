"""A gang without services whose ranks are kept alive: some are killed, by themselves, or leave."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.lib.trainer.ranks.gang_run import Ranks
from tests.lib.trainer.support import make_samples, trainer_config
from trainer.commands import Accumulate, Command, Exit, Release, Restore
from trainer.config import TrainerConfig
from trainer.data.gradient_chunks import GradientChunk
from trainer.data.token_sequence import sequence
from trainer.ranks import worker as worker_module
from trainer.ranks.command_channel import Rank0, RankFailedError, worker_loop
from trainer.ranks.lives import keep_rank
from trainer.ranks.process_group import RankInfo, join
from trainer.ranks.rank_group import RankGroup
from trainer.ranks.worker import Worker
from trainer.step.step_runner import StepRunner
from trainer.tracking.step_record import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """When a rank kills itself by SIGKILL."""

    rank: int
    """Which one."""
    kind: str
    """Name of a command."""
    number: int
    """It dies in this one of that kind, counted from 1."""
    life: int = 1
    """In which of its lives."""


class MortalWorker(Worker):
    """Dies as it is told: at a gradient halfway through an `Accumulate`, or at another command."""

    deaths: tuple[Death, ...] = ()
    place = (0, 1)
    done: Counter[str]

    def do(self, command: Command) -> dict[str, float]:
        """Carry it out, or die."""
        kind = type(command).__name__
        self.done[kind] += 1
        now = Death(rank=self.place[0], kind=kind, number=self.done[kind], life=self.place[1])
        if now in self.deaths:
            self._die(command)
        return super().do(command)

    def _die(self, command: Command) -> None:
        if not isinstance(command, Accumulate):
            os.kill(os.getpid(), signal.SIGKILL)
        layer = self._policy.backend._model.base_model.layers[0]  # type: ignore[attr-defined]
        layer.register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def run_mortal(job: dict[str, Any]) -> None:
    """Run this process's rank of a job: its config, model, out, steps, deaths and replicas."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        _live(job, 1)
    elif code := keep_rank(lambda life: _live(job, life)):
        raise SystemExit(code)


def _live(job: dict[str, Any], life: int) -> None:
    out = Path(str(job["out"]))
    values = {**job["config"], "model": Path(str(job["model"]))}
    config = trainer_config(run_id="r", checkpoint__folder=out / "checkpoints", **values)
    ranks = join(config, life)
    MortalWorker.deaths, MortalWorker.place = tuple(job.get("deaths", ())), (ranks.rank, life)
    MortalWorker.done = Counter()
    if job.get("forgets_state"):
        worker_module.transfer = lambda *_: None
    worker = MortalWorker(config, ranks.store, waits=life > 1)
    if ranks.rank == 0:
        asyncio.run(_lead(Rank0(ranks, worker), config, job, out))
    else:
        worker_loop(ranks, worker, grace_seconds=1.0)
    _note(out, ranks)


def _note(out: Path, ranks: RankInfo) -> None:
    """Leave which process this rank was in the end."""
    (out / f"rank_{ranks.rank}.json").write_text(json.dumps({"life": ranks.life}))


class Forgetful(StepRunner):
    """Goes on with the part in which a rank was lost."""

    async def _go_back(self) -> None:
        self._parts = []
        await super()._go_back()


class NotingRanks(Ranks):
    """Remembers the sizes of the groups that were formed."""

    def __init__(self, rank0: Rank0) -> None:
        super().__init__(rank0)
        self.sizes: list[int] = []

    async def form(self, *, join: bool = False) -> bool:
        """Form a group if there is cause."""
        is_new = await super().form(join=join)
        self.sizes += [self.rank0.world_size] * is_new
        return is_new

    async def begin(self, replicas: Mapping[int, int], step: int) -> None:
        """Have the copies of the models that a step begins with, if there is a number for it."""
        if step in replicas:
            await self.resize(replicas[step])


async def _lead(rank0: Rank0, config: TrainerConfig, job: dict[str, Any], out: Path) -> None:
    """Train; leave losses of steps and sizes of groups that were formed, or an error.

    Before the last step the devices are lent.
    """
    group, losses = NotingRanks(rank0), list[float]()
    runner = (Forgetful if job.get("forgets_parts") else StepRunner)(config, group)
    outcome: dict[str, Any] = {"losses": losses, "sizes": group.sizes}
    try:
        for step in range(1, int(job["steps"]) + 1):
            if step == job["steps"]:
                await group.do(Release())
                await group.do(Restore())
            await group.begin(job.get("replicas", {}), step)
            losses.append(await _step(runner, step))
            await runner.on_those_left(partial(_save, group, out / f"state_{step}"))
    except RankFailedError as error:
        outcome["error"] = str(error)
    (out / "lead.json").write_text(json.dumps(outcome))
    rank0.do(Exit())


async def _step(runner: StepRunner, step: int) -> float:
    """One step in two parts; its loss."""
    record = StepRecord(step, max(step, 2))
    sequences = [sequence(sample) for sample in make_samples(step)]
    first = [item for item in sequences if item.group_id != f"g{step}-2"]
    second = [item for item in sequences if item.group_id == f"g{step}-2"]
    await runner.accumulate(GradientChunk(sequences=first, last=False), record)
    await runner.accumulate(GradientChunk(sequences=second, last=True), record)
    await runner.optimize(record)
    return record.numbers()["loss"]


async def _save(group: RankGroup, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # with shards of those that were lost
    folder.mkdir()
    await group.save(folder)
    await group.wait_written(folder)
