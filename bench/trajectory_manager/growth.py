"""What a token costs, and whether that depends on what is stored already.

Three stores hold 1,000, 10,000 and 100,000 open rollouts, and as many complete groups wait for the
trainer. They are measured in turns, so that whatever else the machine does meets all of them.
The records are real but short, a few hundred tokens: what grows is their number. Open rollouts are
made by the store's own methods, in this process, for speed; all else goes through gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from statistics import median
from typing import Any

import grpc.aio
import numpy as np
import redis
import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from seamflow.channel import connect
from seamflow.common.v1 import tokens_pb2
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import sample_service_pb2, trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.baselines.store.seamflow_append import open_turns, write
from bench.baselines.store.seamflow_run import CREDENTIAL, RUN_ID, create_run, manager, packed
from bench.baselines.store.workload import Options, Segment, Trajectory, make_trajectories
from bench.harness.redis_process import FAST, redis_server
from bench.harness.store_calls import unpacked
from bench.report import MIN_SAMPLES, Report, ratio
from rollout.gateway.record.recorder import Recorder
from trajectory_manager.model.records import (
    Durability,
    Purpose,
    Rollout,
    StalenessPolicy,
    Task,
    TaskLease,
)
from trajectory_manager.model.runs import RunConfig
from trajectory_manager.model.tokens import Origin, Span, Tokens, Turn, VersionSource
from trajectory_manager.service.rollouts import Rollouts
from trajectory_manager.store.redis.connect import Store, redis_store

SIZES = (1_000, 10_000, 100_000)
WRITERS = 8
APPENDS_PER_SECOND = 400
APPEND_TOKENS = 135
STORED_TOKENS = 256
LEASED_SAMPLES = 512
LEASE_ROUNDS = 11
SMALL_CHUNK = 8
_TURN = "turn"
_FILLING = 256
_RECORDED_TOGETHER = 256
_START_SECONDS = 20.0
_LEASE_SECONDS = 86_400.0

Advance = Callable[[float], None]


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=24, help=f"at least {MIN_SAMPLES}")
    parser.add_argument("--round-seconds", type=float, default=1.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="live trajectories")
    given = parser.parse_args()
    if given.rounds < MIN_SAMPLES:
        parser.error(f"--rounds is {given.rounds}: give at least {MIN_SAMPLES}")
    if len(given.sizes) < 2 or min(given.sizes) < LEASED_SAMPLES:
        parser.error(f"--sizes is {given.sizes}: give two or more, of at least {LEASED_SAMPLES}")
    columns = TextColumn("{task.description:36}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns) as progress:
        figures, raw = uvloop.run(_measure(given, progress))
    Report(bench="growth", figures=figures, raw=raw, seeds=[given.seed]).publish()


async def _measure(
    given: argparse.Namespace, progress: Progress
) -> tuple[dict[str, float], dict[str, list[float]]]:
    work = make_trajectories(Options(seed=given.seed, trajectories=512, writers=64, batch=256))
    small = [recut(trajectory, SMALL_CHUNK) for trajectory in work[:128]]
    bar = progress.add_task("bytes of a token", total=1)
    figures = {"bytes_per_token": await bytes_per_token(work)}
    figures["bytes_per_token_small_chunks"] = await bytes_per_token(small)
    progress.advance(bar)
    async with AsyncExitStack() as stack:
        stores = []
        for size in sorted(given.sizes):
            bar = progress.add_task(f"{size:,} live trajectories", total=size)
            store = await stack.enter_async_context(filled(size, given.seed))
            await store.open_rollouts(size, partial(progress.advance, bar))
            stores.append(store)
        bar = progress.add_task("append", total=(given.rounds + 1) * len(stores))
        append = partial(Filled.append_p99, seconds=given.round_seconds)
        p99s = await _rounds(stores, given.rounds, append, partial(progress.advance, bar))
        for store in (ends := (stores[0], stores[-1])):
            bar = progress.add_task(f"{store.size:,} waiting groups", total=store.size)
            await store.record_groups(store.size, partial(progress.advance, bar))
        bar = progress.add_task("lease", total=(LEASE_ROUNDS + 1) * len(ends))
        leases = await _rounds(ends, LEASE_ROUNDS, Filled.lease, partial(progress.advance, bar))
    medians = {store.size: median(p99s[store.size]) for store in stores}
    # Of neighbouring rounds: on a shared machine a percentile swings more with time than by size.
    pairs = permutations(p99s.values(), 2)
    figures["append_p99_growth"] = max(ratio(one, other) for one, other in pairs)
    figures["lease_512_growth"] = ratio(leases[ends[1].size], leases[ends[0].size])
    figures |= {f"append_p99_ms_{size}": value for size, value in medians.items()}
    figures |= {f"lease_512_ms_{size}": median(found) for size, found in leases.items()}
    raw = {f"append_p99_ms_{size}": found for size, found in p99s.items()}
    return figures, raw | {f"lease_512_ms_{size}": found for size, found in leases.items()}


async def _rounds(
    stores: Sequence[Filled],
    rounds: int,
    measure: Callable[[Filled], Awaitable[float]],
    advance: Advance,
) -> dict[int, list[float]]:
    """Size -> what each round measured, stores in turns; one more round first warms up."""
    found: dict[int, list[float]] = {store.size: [] for store in stores}
    for number in range(rounds + 1):
        for store in stores:
            measured = await measure(store)
            if number:
                found[store.size].append(measured)
            advance(1)
    return found


@dataclass(slots=True)
class _OpenTurn:
    """A rollout that runs, with its only turn."""

    rollout_id: str
    epoch: int
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class Filled:
    """A store with a manager of its own, and what was put into it."""

    size: int
    """Live trajectories it is meant to hold."""
    store: Store
    """For filling, in this process."""
    channel: grpc.aio.Channel
    """To the manager's process."""
    random: np.random.Generator
    """Draws tokens, and which rollouts grow."""
    live: list[_OpenTurn] = field(default_factory=list)
    """Rollouts that run."""
    num_recorded: int = 0
    """Groups recorded so far."""
    steps: int = 0
    """Steps leased so far."""
    epoch: int = 0
    """The trainer's; 0 before its first step."""

    async def open_rollouts(self, number: int, advance: Advance) -> None:
        """Add live trajectories: leased, started, with an open turn and some tokens."""
        rollouts = Rollouts(self.store)

        async def opened(index: int) -> None:
            await self.store.runs.submit(RUN_ID, [_task(f"live-{index}")], max_queued=_FILLING)
            lease = await self.store.runs.lease_task(RUN_ID, [Purpose.TRAIN], f"{index:032x}")
            assert isinstance(lease, TaskLease), "admission has room for all"
            rollout = Rollout(
                run_id=RUN_ID,
                rollout_id=lease.rollout_id,
                purpose=Purpose.TRAIN,
                credential_digest=CREDENTIAL,
            )
            await rollouts.start(rollout, lease.nonce)
            self.live.append(await self._open_turn(lease.rollout_id))

        await _together(map(opened, range(number)), advance)

    async def _open_turn(self, rollout_id: str) -> _OpenTurn:
        turn = Turn(turn_id=_TURN, attempt_id="bench", prompt_digest="0" * 64)
        tokens = self.store.tokens
        _, begun = await tokens.begin_turn(RUN_ID, rollout_id, CREDENTIAL, turn)
        append = pb.TokenAppend(
            run_id=RUN_ID, rollout_id=rollout_id, turn_id=_TURN, epoch=begun.epoch
        )
        self._tokens().fill(append.tokens)
        await tokens.append([append])
        return _OpenTurn(rollout_id, begun.epoch, STORED_TOKENS)

    async def record_groups(self, number: int, advance: Advance = lambda _: None) -> None:
        """Add complete groups of one sample each, which wait for the trainer."""
        stub = async_stub(TrajectoryServiceStub, self.channel)
        first, self.num_recorded = self.num_recorded, self.num_recorded + number
        for start in range(first, first + number, _RECORDED_TOGETHER):
            indexes = range(start, min(start + _RECORDED_TOGETHER, first + number))
            groups = [self._group(f"recorded-{index}") for index in indexes]
            await stub.RecordGroups(pb.RecordGroupsRequest(run_id=RUN_ID, groups=groups))
            advance(len(groups))

    def _group(self, task_id: str) -> pb.RecordedGroup:
        turn = trajectory_pb2.Turn(
            turn_id=_TURN,
            tokens=unpacked(packed([_segment(self.random, STORED_TOKENS)])),
            finish_reason=tokens_pb2.FINISH_REASON_STOP,
        )
        rewards = tokens_pb2.Rewards(rewards=[tokens_pb2.Reward(name="reward", value=1.0)])
        rollout = pb.RecordedRollout(turns=[turn], rewards=rewards)
        return pb.RecordedGroup(task_id=task_id, rollouts=[rollout])

    def _tokens(self) -> Tokens:
        segment = _segment(self.random, STORED_TOKENS)
        span = Span(
            num_tokens=STORED_TOKENS,
            origin=Origin.POLICY,
            version_source=VersionSource.ENGINE,
            server_id="server-0",
        )
        return Tokens(
            ids=segment.token_ids.tobytes(), logprobs=segment.logprobs.tobytes(), spans=(span,)
        )

    async def append_p99(self, seconds: float) -> float:
        """99th percentile of the latency of an append, in ms."""
        return float(np.percentile(await self.append_for(seconds), 99)) * 1000

    async def append_for(self, seconds: float) -> list[float]:
        """Latency in seconds of each append of a fixed load: every writer awaits its own."""
        recorder = Recorder(async_stub(TrajectoryServiceStub, self.channel))
        sending = asyncio.create_task(recorder.keep_sending())
        latencies: list[float] = []
        started = time.monotonic() + 0.1

        async def write_at(number: int) -> None:
            mine = self.live[number::WRITERS]  # a turn has one writer
            for index in range(number, int(APPENDS_PER_SECOND * seconds), WRITERS):
                due = started + index / APPENDS_PER_SECOND
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                turn = mine[self.random.integers(len(mine))]
                message = self._append(turn)
                sent = time.monotonic()
                turn.num_tokens = await recorder.record(message)
                latencies.append(time.monotonic() - sent)

        try:
            await asyncio.gather(*map(write_at, range(WRITERS)))
        finally:
            sending.cancel()
        return latencies

    def _append(self, turn: _OpenTurn) -> pb.TokenAppend:
        return pb.TokenAppend(
            run_id=RUN_ID,
            rollout_id=turn.rollout_id,
            turn_id=_TURN,
            epoch=turn.epoch,
            offset=turn.num_tokens,
            tokens=packed([_segment(self.random, APPEND_TOKENS)]),
        )

    async def lease(self) -> float:
        """Milliseconds of a step's lease; the step is committed, and its groups made up for."""
        stub = async_stub(SampleServiceStub, self.channel)
        if not self.epoch:
            request = sample_service_pb2.ReconcileRequest(run_id=RUN_ID, trainer_id="bench")
            self.epoch = (await stub.Reconcile(request)).epoch
        self.steps += 1
        wanted = sample_service_pb2.LeaseSamplesRequest(
            run_id=RUN_ID, epoch=self.epoch, step=self.steps
        )
        sent = time.monotonic()
        samples = (await stub.LeaseSamples(wanted)).samples
        milliseconds = (time.monotonic() - sent) * 1000
        assert len(samples) == LEASED_SAMPLES, f"{len(samples)} samples"
        commit = sample_service_pb2.CommitStepRequest(
            run_id=RUN_ID, epoch=self.epoch, step=self.steps
        )
        await stub.CommitStep(commit)
        await self.record_groups(LEASED_SAMPLES)
        return milliseconds


@asynccontextmanager
async def filled(size: int, seed: int) -> AsyncIterator[Filled]:
    """An empty store of its own, whose run has room for `size` live and as many waiting groups."""
    with redis_server(FAST) as url:
        options = Options(seed=seed, trajectories=size, writers=WRITERS, batch=1, redis=url)
        async with (
            manager(options) as target,
            connect(target) as channel,
            redis_store(url, Durability.FAST, _START_SECONDS) as store,
        ):
            await store.runs.create_run(RUN_ID, _rules(2 * size))
            random = np.random.default_rng([seed, size])
            yield Filled(size=size, store=store, channel=channel, random=random)


async def bytes_per_token(work: Sequence[Trajectory]) -> float:
    """Growth of Redis' memory over the tokens of `work`, appended and finished but not leased."""
    with redis_server(FAST) as url:
        options = Options(seed=0, trajectories=len(work), writers=64, batch=64, redis=url)
        async with manager(options) as target, connect(target) as channel:
            with redis.Redis.from_url(url) as client:
                before = _used_memory(client)
                await create_run(channel, options, trajectory_pb2.DURABILITY_FAST)
                await write(channel, work, options, await open_turns(channel, len(work)))
                grown = _used_memory(client) - before
    return grown / sum(part.token_ids.size for one in work for part in one.segments)


def recut(trajectory: Trajectory, num_tokens: int) -> Trajectory:
    """The same tokens in segments of `num_tokens`."""
    segments = [
        Segment(
            token_ids=segment.token_ids[start : start + num_tokens],
            logprobs=segment.logprobs[start : start + num_tokens],
            weight_versions=segment.weight_versions[start : start + num_tokens],
        )
        for segment in trajectory.segments
        for start in range(0, segment.token_ids.size, num_tokens)
    ]
    return replace(trajectory, segments=tuple(segments))


def _used_memory(client: redis.Redis) -> int:
    info: Any = client.info("memory")
    return int(info["used_memory"])


async def _together(work: Iterator[Awaitable[None]], advance: Advance) -> None:
    """Await all of `work`, so many at a time that the store gets them in batches."""

    async def in_turn() -> None:
        for one in work:
            await one
            advance(1)

    await asyncio.gather(*(in_turn() for _ in range(_FILLING)))


def _rules(num_groups: int) -> RunConfig:
    return RunConfig(
        group_size=1,
        groups_per_step=LEASED_SAMPLES,
        max_staleness=num_groups // LEASED_SAMPLES + 1,
        staleness_policy=StalenessPolicy.MASK,
        lease_seconds=_LEASE_SECONDS,
        zero_variance_reward="",
        durability=Durability.FAST,
    )


def _task(task_id: str) -> Task:
    return Task(
        task_id=task_id,
        payload_json='{"prompt": "45-06="}',
        num_samples=1,
        purpose=Purpose.TRAIN,
    )


def _segment(random: np.random.Generator, num_tokens: int) -> Segment:
    return Segment(
        token_ids=random.integers(0, 150_000, num_tokens, dtype=np.int32),
        logprobs=-random.random(num_tokens, dtype=np.float32),
        weight_versions=np.zeros(num_tokens, np.int32),
    )


if __name__ == "__main__":
    main()
