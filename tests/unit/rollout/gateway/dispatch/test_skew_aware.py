"""The skew-aware policy: which servers turns get, and that no server is idle."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from bench.rollout.dispatch import generation_seconds
from bench.rollout.streamrl import SkewAwareMax, SkewAwareSum
from rollout.gateway.dispatch.policies import (
    Candidate,
    DispatchPolicy,
    PoolSnapshot,
    TurnRequest,
    load_dispatch,
)
from rollout.gateway.dispatch.server_state import Server
from rollout.gateway.dispatch.skew_aware import (
    LONG_SHARES,
    SkewAware,
    StepLoad,
    TailSplit,
    best_split,
    completion_seconds,
)
from rollout.gateway.dispatch.waiting_turns import WaitingTurns
from services.lib.decode_latency import DecodeLatency
from tests.lib.rollout.gateway.support import until_idle
from tests.unit.rollout.gateway.dispatch.random_loads import instance, least_at_or_above

LATENCY = DecodeLatency.of({1: 0.0085, 8: 0.0085, 32: 0.010, 64: 0.0115, 128: 0.015})


def request(expected_tokens: float, *, continues: bool = False) -> TurnRequest:
    """A turn of that length."""
    return TurnRequest(
        group="task",
        rollout="task",
        num_tokens=10,
        max_new_tokens=1 << 20,
        expected_tokens=expected_tokens,
        continues=continues,
    )


def candidate(number: int, num_turns: int = 0) -> Candidate:
    """Server `number` with some turns."""
    return Candidate(
        server_id=f"{number:02}", num_turns=num_turns, max_running=64, tokens_per_second=0.0
    )


def planned(policy: SkewAware) -> SkewAware:
    """A policy that has seen 512 turns, one in twenty very long, for 8 servers."""
    for number in range(512):
        policy.order(request(20_000.0 if number % 20 == 0 else 500.0))
    servers = [candidate(number) for number in range(8)]
    policy.plan(PoolSnapshot(num_waiting=512, servers=servers, latency=LATENCY))
    return policy


def chosen(policy: SkewAware, expected_tokens: float) -> set[str]:
    """All servers that such turns get, one after the other, of empty ones."""
    left, names = [candidate(number) for number in range(8)], set()
    while left:
        taken = policy.choose(request(expected_tokens), left)
        assert taken is not None
        names.add(taken.server_id)
        left = [c for c in left if c.server_id != taken.server_id]
    return names


def test_long_turns_get_separate_servers() -> None:
    """While both groups have room, none takes a turn of the other."""
    policy = planned(SkewAware())
    servers = [candidate(number, 1) for number in range(8)]
    long = {c.server_id for _ in range(8) if (c := policy.choose(request(20_000.0), servers))}
    rest = {c.server_id for _ in range(8) if (c := policy.choose(request(500.0), servers))}
    assert long
    assert rest
    assert not long & rest


@pytest.mark.parametrize("make", [SkewAware, SkewAwareSum, SkewAwareMax])
def test_an_idle_server_takes_any_turn(make: type[SkewAware]) -> None:
    """Of either group."""
    policy = planned(make())
    assert chosen(policy, 500.0) == chosen(policy, 20_000.0) == {f"{n:02}" for n in range(8)}


def test_a_short_turn_waits_rather_than_slow_the_long_ones_down() -> None:
    """Their servers have as many as they are meant to have; a turn given up elsewhere may go."""
    policy = planned(SkewAware())
    long_server = policy.choose(request(20_000.0), [candidate(n) for n in range(8)])
    assert long_server is not None
    busy = [candidate(int(long_server.server_id), 40)]
    assert policy.choose(request(500.0), busy) is None
    assert policy.choose(request(500.0, continues=True), busy) == busy[0]
    assert policy.choose(request(20_000.0), busy) == busy[0]


def test_without_a_plan_it_is_longest_first_on_the_least_loaded() -> None:
    """As when a gateway has just started."""
    policy = SkewAware()
    servers = [candidate(0, 5), candidate(1, 3)]
    assert policy.choose(request(9e9), servers) == servers[1]
    assert policy.choose(request(1.0), servers) == servers[1]
    assert policy.order(request(1000.0)) < policy.order(request(10.0))


class Strict(SkewAware):
    """No turn ever goes to a server of the other group: the negative control."""

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate | None:
        """A server of the turn's group, or none."""
        is_long = turn.expected_tokens > self._split.long_tokens
        own = [c for c in candidates if (c.server_id in self._long_servers) == is_long]
        return own[0] if own else None


async def idle_while_others_wait(policy: DispatchPolicy, seed: int) -> int:
    """Times that a server had nothing while a turn waited; turns come and end at random."""
    draw = random.Random(seed)
    info = [pb.GetServerInfoResponse(server_id=f"{n}", max_running=4) for n in range(5)]
    nothing: object = None
    servers = [Server(i.server_id, nothing, nothing, i) for i in info]  # type: ignore[arg-type]
    turns = WaitingTurns(
        policy,
        lambda *_: [server for server in servers if server.has_room(1.0)],
        max_waiting=1000,
        serving=lambda: servers,
        latency=LATENCY,
    )
    waiting: list[asyncio.Task[Server]] = []
    num_idle = 0
    for _ in range(200):
        if draw.random() < 0.7:
            tokens = 20_000.0 if draw.random() < 0.1 else draw.uniform(100, 900)
            waiting.append(asyncio.create_task(turns.acquire(request(tokens))))
        elif busy := [server for server in servers if server.num_turns]:
            turns.release(draw.choice(busy))
        await until_idle()
        num_idle += bool(len(turns)) and any(not server.num_turns for server in servers)
    while len(turns):  # no turn starves: all get a slot as slots become free
        turns.release(max(servers, key=lambda server: server.num_turns))
        await until_idle()
    assert all(task.done() for task in waiting)
    return num_idle


@pytest.mark.parametrize("seed", range(3))
async def test_no_server_is_idle_while_a_turn_waits(seed: int) -> None:
    """Whatever comes, in whatever order it ends."""
    assert await idle_while_others_wait(SkewAware(), seed) == 0


def test_without_taking_turns_of_others_a_server_is_idle() -> None:
    """Negative control of the test above."""
    policy = planned(Strict())
    long_server = policy.choose(request(20_000.0), [candidate(n) for n in range(8)])
    assert long_server is not None
    assert policy.choose(request(500.0), [long_server]) is None


def test_a_step_ends_sooner_than_in_order_of_arrival_and_than_longest_first() -> None:
    """A long tail on an emulated pool, with lengths known."""
    random = np.random.default_rng(5)
    lengths = np.clip(np.exp(random.normal(7.4, 0.8, 2048)), 1, 20_480).tolist()

    def seconds(name: str) -> float:
        return generation_seconds(
            load_dispatch(name),
            lengths,
            lengths,
            num_instances=8,
            slots=64,
            latency=LATENCY,
        )

    fifo, longest, skew = map(seconds, ("least_load", "longest_first", "skew_aware"))
    assert skew < longest < fifo


STREAMRL = DecodeLatency.of({1: 0.0085, 8: 0.0085, 32: 0.010, 64: 0.0115, 128: 0.015, 256: 0.021})


def end_of(load: StepLoad, latency: DecodeLatency, split: TailSplit) -> float:
    """When the later group ends, with the lengths of each summed up one by one."""
    long = [tokens for tokens in load.recent if tokens > split.long_tokens]
    rest = [tokens for tokens in load.recent if tokens <= split.long_tokens]
    most = max(load.recent)
    ends = [
        completion_seconds(
            load.num_turns - split.num_long_turns,
            rest,
            min(1.5 * split.long_tokens, most),
            load.num_servers - split.num_long_servers,
            load.slots,
            latency,
        ),
        completion_seconds(
            split.num_long_turns, long, most, split.num_long_servers, load.slots, latency
        ),
    ]
    return max(ends)


def test_no_tail_ends_the_step_earlier() -> None:
    """On 1,000 instances: over all shares and numbers of servers, and none at all."""
    for seed in range(1000):
        load, latency = instance(seed)
        options = [TailSplit()]
        for share in LONG_SHARES:
            long_tokens = least_at_or_above(1 - share, load.recent)
            above = sum(tokens > long_tokens for tokens in load.recent) / len(load.recent)
            if num_long := math.floor(load.num_turns * above + 1e-9):
                options += [
                    TailSplit(
                        num_long_turns=num_long, num_long_servers=number, long_tokens=long_tokens
                    )
                    for number in range(1, load.num_servers)
                ]
        best = min(end_of(load, latency, option) for option in options)
        assert end_of(load, latency, best_split(load, latency)) == pytest.approx(best)


def test_where_all_servers_are_full_for_long_nothing_is_isolated() -> None:
    """Throughput decides, not the longest turn."""
    recent = [float(tokens) for tokens in range(900, 1100)]
    load = StepLoad(num_turns=100_000, num_servers=8, slots=64, recent=recent)
    assert best_split(load, STREAMRL) == TailSplit()


def test_few_very_long_turns_get_separate_servers() -> None:
    """Fewer turns on each of these than on the others."""
    recent = sorted([1000.0] * 190 + [20_000.0] * 10)
    load = StepLoad(num_turns=2000, num_servers=16, slots=128, recent=recent)
    split = best_split(load, STREAMRL)
    assert (split.num_long_turns, split.long_tokens) == (100, 1000.0)
    assert split.turns_per_long_server < 2000 / 16


@pytest.mark.parametrize("recent", [[], [5.0]])
def test_nothing_known_isolates_nothing(recent: list[float]) -> None:
    """No turn has come yet, or all are equally long."""
    load = StepLoad(num_turns=100, num_servers=4, slots=8, recent=recent)
    assert best_split(load, STREAMRL) == TailSplit()
