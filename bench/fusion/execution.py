"""Plans carried out on gloo ranks whose stages sleep, next to the planned times."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.fusion.gradients import GradientCase, gradient_difference
from trainer.pipeline.fused_schedule.plan import fused_plan, serial_orders
from trainer.pipeline.fused_schedule.problem import Orders, Pipeline, Problem, timeline
from trainer.pipeline.interpreter import Interpreter, Peers, Shape, StageWork
from trainer.pipeline.layout import Layout, layout_of
from trainer.pipeline.schedule import actions_of

RANKS = 4
_SECONDS = 600.0
_SHAPE: Shape = ((8, 64), torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepCase:
    """An actor and a critic on `RANKS` ranks; times are in ticks."""

    name: str
    micro_batches: int
    actor: tuple[int, ...]
    """Forward time of each stage; backward takes twice as long."""
    critic: tuple[int, ...]
    """The same of the critic; fewer stages than ranks: replicas."""

    @property
    def layout(self) -> Layout:
        """Of the stages."""
        return layout_of(RANKS, len(self.critic))

    def problem(self) -> Problem:
        """In ticks; the actor waits for the critic's values."""
        replicas = self.layout.num_replicas
        counts = [self.micro_batches] + [
            len(range(each, self.micro_batches, replicas)) for each in range(replicas)
        ]
        models = zip(self.layout.ranks, counts, strict=True)
        return Problem(
            pipelines=tuple(
                _pipeline(ranks, count, self.critic if model else self.actor)
                for model, (ranks, count) in enumerate(models)
            ),
            values=True,
        )


CASES = (
    SleepCase(name="even", micro_batches=8, actor=(2,) * 4, critic=(1,) * 4),
    SleepCase(name="large_critic", micro_batches=8, actor=(2,) * 4, critic=(2,) * 4),
    SleepCase(name="two_replicas", micro_batches=8, actor=(2,) * 4, critic=(2, 2)),
    SleepCase(name="uneven", micro_batches=9, actor=(3, 2, 2, 3), critic=(1, 2, 1, 2)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """Seconds of a case, one model after the other and fused: planned, and of each repeat."""

    name: str
    serial_planned: float
    serial: list[float]
    fused_planned: float
    fused: list[float]


def execute(
    cases: Sequence[SleepCase], tick_seconds: float, repeats: int, gradients: Sequence[GradientCase]
) -> tuple[list[Executed], list[float]]:
    """Carry out all plans some times, and compare gradients; their differences."""
    jobs = [_Job.of(case, tick_seconds) for case in cases]
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        _run_ranks(out, jobs, repeats, gradients)
        found = json.loads(out.read_text())
    return [Executed(**each) for each in found["executed"]], found["gradients"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A case and its plans, which the ranks share as a search ends by CPU time."""

    case: SleepCase
    serial: Orders
    fused: Orders
    tick_seconds: float

    @classmethod
    def of(cls, case: SleepCase, tick_seconds: float) -> _Job:
        problem = case.problem()
        fused = fused_plan(problem, cpu_seconds=5.0).orders
        serial = serial_orders(problem)
        return cls(case=case, serial=serial, fused=fused, tick_seconds=tick_seconds)

    def run(self, repeats: int) -> Executed:
        """On this rank. Collective."""
        both = [(self._once(self.serial), self._once(self.fused)) for _ in range(repeats)]
        serial, fused = ([pair[which] for pair in both] for which in (0, 1))
        return Executed(
            name=self.case.name,
            serial_planned=self._planned(self.serial),
            serial=serial,
            fused_planned=self._planned(self.fused),
            fused=fused,
        )

    def _planned(self, orders: Orders) -> float:
        return timeline(self.case.problem(), orders).seconds * self.tick_seconds

    def _once(self, orders: Orders) -> float:
        """Seconds until the last rank is done."""
        layout, rank = self.case.layout, dist.get_rank()
        problem = self.case.problem()
        works: dict[int, StageWork] = {
            model: _Sleeping(problem.pipelines[model], stage, self.tick_seconds)
            for model, stage in layout.stages_on(rank).items()
        }
        interpreter = Interpreter(layout, rank, Peers(layout, rank, "cpu", None))
        actions = actions_of(orders, layout)[rank]
        dist.barrier()
        began = time.perf_counter()
        interpreter.run(actions, works)
        seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()


class _Sleeping:
    """A stage that takes its time and passes a small tensor on."""

    def __init__(self, pipeline: Pipeline, stage: int, tick_seconds: float) -> None:
        self._forward = pipeline.forward[stage] * tick_seconds
        self._backward = pipeline.backward[stage] * tick_seconds

    def incoming(self, kind: int, micro_batch: int) -> Shape:
        """Always alike."""
        return _SHAPE

    def forward(self, micro_batch: int, given: Tensor | None) -> Tensor | None:
        """Sleep."""
        time.sleep(self._forward)
        return torch.zeros(_SHAPE[0])

    def backward(self, micro_batch: int, given: Tensor | None) -> Tensor | None:
        """Sleep."""
        time.sleep(self._backward)
        return torch.zeros(_SHAPE[0])


def _pipeline(ranks: tuple[int, ...], count: int, forward: tuple[int, ...]) -> Pipeline:
    return Pipeline(
        nodes=ranks,
        num_micro_batches=count,
        forward=forward,
        backward=tuple(2 * each for each in forward),
    )


def _run_ranks(
    out: Path, jobs: Sequence[_Job], repeats: int, gradients: Sequence[GradientCase]
) -> None:
    context, port = multiprocessing.get_context("spawn"), _free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, port, out, jobs, repeats, gradients), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(_SECONDS)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")


def _rank(
    rank: int,
    port: int,
    out: Path,
    jobs: Sequence[_Job],
    repeats: int,
    gradients: Sequence[GradientCase],
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    timeout = timedelta(seconds=_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    executed = [job.run(repeats) for job in jobs]
    differences = [gradient_difference(case) for case in gradients]
    dist.barrier()
    if rank == 0:
        found = {"executed": [asdict(each) for each in executed], "gradients": differences}
        out.write_text(json.dumps(found))
    os._exit(0)  # without the teardown of the group


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
