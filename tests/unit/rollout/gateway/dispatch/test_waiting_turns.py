"""The queue of waiting turns: order, limit and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from rollout.gateway.config import GatewayConfig
from rollout.gateway.dispatch.policies import (
    Candidate,
    DispatchPolicy,
    LeastLoad,
    LongestFirst,
    PrefixAffinity,
    TurnRequest,
)
from rollout.gateway.dispatch.server_pool import ServerPool
from rollout.gateway.dispatch.server_state import Server
from rollout.gateway.dispatch.waiting_turns import WaitingTurns
from services.chassis.errors import Reason, ServiceError
from tests.lib.rollout.gateway.support import until_idle


def request(
    expected_tokens: float = 32.0, *, continues: bool = False, required_version: int = 0
) -> TurnRequest:
    """A turn of that length."""
    return TurnRequest(
        group=str(expected_tokens),
        rollout=str(expected_tokens),
        num_tokens=10,
        max_new_tokens=10_000,
        expected_tokens=expected_tokens,
        continues=continues,
        required_weight_version=required_version,
    )


def server(server_id: str = "a", max_running: int = 1, weight_version: int = 0) -> Server:
    """A server that serves."""
    info = pb.GetServerInfoResponse(
        server_id=server_id, max_running=max_running, weight_version=weight_version
    )
    nothing: Any = None
    return Server(server_id, nothing, nothing, info)


class Queue:
    """Waiting turns before some servers, and how often these were looked at."""

    def __init__(
        self,
        *servers: Server,
        policy: DispatchPolicy | None = None,
        max_waiting: int = 100,
        weights_timeout: float | None = None,
    ) -> None:
        self.servers = servers
        self.num_looks = 0
        self.now = 0.0
        self.turns = WaitingTurns(
            policy or LeastLoad(),
            self._with_room,
            max_waiting,
            clock=lambda: self.now,
            weights_timeout=weights_timeout,
        )

    def _with_room(
        self, pinned: int | None, required_version: int, avoided: frozenset[str]
    ) -> list[Server]:
        self.num_looks += 1
        return [
            s
            for s in self.servers
            if s.has_room(1.0)
            and s.info is not None
            and (pinned is None or s.info.weight_version == pinned)
            and s.info.weight_version >= required_version
        ]

    async def wait(self, given: TurnRequest, pinned: int | None = None) -> asyncio.Task[Server]:
        """A turn that has begun to wait."""
        task = asyncio.create_task(self.turns.acquire(replace(given, pinned_weight_version=pinned)))
        await until_idle()
        return task

    async def order(self, waiting: dict[str, asyncio.Task[Server]]) -> list[str]:
        """Free one place after the other; the names in the order they get it."""
        names: list[str] = []
        while len(names) < len(waiting):
            self.turns.release(self.servers[0])
            await until_idle()
            names += [n for n, task in waiting.items() if task.done() and n not in names]
        return names


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (LeastLoad(), ["rest", "short", "long", "middle"]),
        (PrefixAffinity(), ["rest", "short", "long", "middle"]),
        (LongestFirst(), ["rest", "long", "middle", "short"]),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_turns_wait_in_the_order_of_the_policy(
    policy: DispatchPolicy, expected: list[str]
) -> None:
    """The rest of a turn comes first; else by arrival, or the longest of those that came now."""
    queue = Queue(server(), policy=policy)
    await queue.turns.acquire(request())
    waiting = {
        "short": await queue.wait(request(10)),
        "long": await queue.wait(request(5000)),
        "middle": await queue.wait(request(600)),
        "rest": await queue.wait(request(1, continues=True)),
    }
    assert await queue.order(waiting) == expected


async def test_short_turns_do_not_starve() -> None:
    """However many longer ones come, those that come 30 seconds later wait behind."""
    queue = Queue(server(), policy=LongestFirst())
    await queue.turns.acquire(request())
    waiting = {"short": await queue.wait(request(1))}
    for second in range(1, 100):
        queue.now = float(second)
        waiting[f"long {second}"] = await queue.wait(request(1e6))
    place = (await queue.order(waiting)).index("short")
    assert place == 29


async def test_a_server_gets_as_many_turns_as_it_has_room_for() -> None:
    """The others wait here, and each that leaves makes room for one."""
    queue = Queue(server("a", 2), server("b", 1))
    tasks = [await queue.wait(request()) for _ in range(5)]
    assert [task.done() for task in tasks] == [True, True, True, False, False]
    assert sorted(task.result().address for task in tasks[:3]) == ["a", "a", "b"]
    queue.turns.release(queue.servers[1])
    assert (await tasks[3]).address == "b"
    assert len(queue.turns) == 1
    tasks[4].cancel()


async def test_as_many_turns_wait_as_may() -> None:
    """One more turn fails with a retry time and the name of the limit."""
    queue = Queue(max_waiting=2)
    tasks = [await queue.wait(request()) for _ in range(2)]
    with pytest.raises(ServiceError, match="max_waiting_turns") as caught:
        await queue.turns.acquire(request())
    refused = caught.value
    assert (refused.code, refused.reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.TOO_MANY_REQUESTS,
    )
    assert refused.retry_after
    rest = await queue.wait(request(continues=True))
    assert len(queue.turns) == 3
    for task in [*tasks, rest]:
        task.cancel()


async def test_the_gauge_counts_those_that_wait() -> None:
    """Whether they come, get a server or go away."""

    def count() -> float:
        return REGISTRY.get_sample_value("seamflow_rollout_gateway_waiting_turns") or 0.0

    before = count()
    queue = Queue(server())
    await queue.turns.acquire(request())
    assert count() == before
    served, gone = await queue.wait(request()), await queue.wait(request())
    assert count() == before + 2
    queue.turns.release(queue.servers[0])
    assert count() == before + 1
    gone.cancel()
    await until_idle()
    assert (served.done(), count()) == (True, before)


async def test_whoever_is_cancelled_leaves() -> None:
    """Its place in the queue is free for another, and it never gets a server."""
    queue = Queue(server(), max_waiting=2)
    await queue.turns.acquire(request())
    gone, stays = await queue.wait(request()), await queue.wait(request())
    gone.cancel()
    await until_idle()
    assert len(queue.turns) == 1
    later = await queue.wait(request())
    queue.turns.release(queue.servers[0])
    assert await stays
    assert not later.done()
    later.cancel()


async def test_a_server_given_to_whoever_is_cancelled_goes_to_the_next() -> None:
    """Both happen between two steps of the waiting task."""
    queue = Queue(server())
    await queue.turns.acquire(request())
    gone, stays = await queue.wait(request()), await queue.wait(request())
    queue.turns.release(queue.servers[0])
    gone.cancel()
    with suppress(asyncio.CancelledError):
        await gone
    assert await stays
    assert queue.servers[0].num_turns == 1


async def test_a_cancelled_turn_that_is_still_queued_gets_no_server() -> None:
    """The other order of the same two: first cancelled, then there is room."""
    queue = Queue(server())
    await queue.turns.acquire(request())
    gone, stays = await queue.wait(request()), await queue.wait(request())
    gone.cancel()
    queue.turns.release(queue.servers[0])
    assert await stays
    assert queue.servers[0].num_turns == 1


async def test_a_pinned_turn_holds_up_nobody() -> None:
    """It waits for its version; others pass it by, and the reverse."""
    queue = Queue(server("new", 1, weight_version=7))
    pinned = await queue.wait(request(), pinned=6)
    assert (await queue.turns.acquire(request())).address == "new"
    other = await queue.wait(request(), pinned=7)
    behind = await queue.wait(request())
    queue.turns.release(queue.servers[0])
    await until_idle()
    assert (pinned.done(), other.done(), behind.done()) == (False, True, False)
    pinned.cancel()
    behind.cancel()


async def test_a_free_place_wakes_one_turn() -> None:
    """Of a thousand waiting turns, only the one that gets the server is woken."""
    queue = Queue(server(), max_waiting=1000)
    await queue.turns.acquire(request())
    tasks = [asyncio.create_task(queue.turns.acquire(request())) for _ in range(1000)]
    await until_idle()
    queue.num_looks = 0
    queue.turns.release(queue.servers[0])
    await until_idle()
    assert sum(task.done() for task in tasks) == 1
    assert queue.num_looks == 2  # one turn is placed, the next one finds no room
    for task in tasks:
        task.cancel()


async def test_whoever_comes_behind_others_looks_at_no_server() -> None:
    """They wait already, so there is none; a turn that comes before them looks."""
    queue = Queue(server())
    await queue.turns.acquire(request())
    first = await queue.wait(request())
    queue.num_looks = 0
    behind = await queue.wait(request())
    assert queue.num_looks == 0
    before = await queue.wait(request(continues=True))
    assert queue.num_looks == 1
    for task in (first, behind, before):
        task.cancel()


class Choosy(LeastLoad):
    """Keeps long turns waiting while a server has any turn."""

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate | None:  # type: ignore[override]
        """None for a long one."""
        if turn.expected_tokens > 100 and any(c.num_turns for c in candidates):
            return None
        return super().choose(turn, candidates)


async def test_who_waits_behind_a_turn_that_goes_away_is_next() -> None:
    """At once: what it waited for was not a server, but that turn."""
    queue = Queue(server("a", 2), policy=Choosy())
    await queue.turns.acquire(request())
    long, short = await queue.wait(request(1000)), await queue.wait(request())
    assert not short.done()
    long.cancel()
    await until_idle()
    assert short.done()


class Broken(LeastLoad):
    """A plug-in policy with a bug."""

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate:
        """Fail for one group."""
        if turn.group == "1":
            raise KeyError(turn.group)
        return super().choose(turn, candidates)


async def test_a_policy_that_fails_fails_that_turn_alone() -> None:
    """The others get their servers."""
    queue = Queue(server("a", 2), policy=Broken())
    with pytest.raises(KeyError):
        await queue.turns.acquire(request(1))
    assert await queue.turns.acquire(request(2))
    assert queue.servers[0].num_turns == 1


def test_turns_of_other_gateways_take_room() -> None:
    """A report counts ours too: only turns beyond these are other gateways'."""
    ours = server("a", 4)
    ours.num_turns = 3
    report = pb.GetServerInfoResponse(server_id="a", max_running=4, num_running=3, num_queued=2)
    ours.report(report, num_turns_before=4)
    assert (ours.num_foreign, ours.candidate().num_turns) == (1, 4)
    assert (ours.has_room(1.0), ours.has_room(1.25)) == (False, True)


def test_a_server_that_names_no_slots_has_room() -> None:
    """Its limit is unknown to the gateway."""
    assert server("a", 0).has_room(1.0)


async def test_a_turn_waits_for_the_weights_it_needs() -> None:
    """It does not hold up a turn that may use older weights."""
    old, new = server("old", max_running=2, weight_version=3), server("new", weight_version=4)
    queue = Queue(old)
    needs = await queue.wait(request(required_version=4))
    assert (await queue.turns.acquire(request(required_version=3))) is old
    assert not needs.done()
    queue.servers = (old, new)
    queue.turns.assign()
    assert await needs is new


async def test_a_turn_that_waits_for_weights_can_be_cancelled() -> None:
    """It is in a separate queue."""
    queue = Queue(server())
    waiting = await queue.wait(request(required_version=1))
    waiting.cancel()
    await asyncio.wait([waiting])
    assert len(queue.turns) == 0


async def test_waiting_for_required_weights_times_out() -> None:
    """The trainer may have died before publishing them."""
    old = server()
    queue = Queue(old, weights_timeout=0.01)
    assert await queue.turns.acquire(request(required_version=1)) is old


def test_servers_with_older_weights_are_not_asked() -> None:
    """Nor those that are behind all the run, whatever a group needs."""
    servers = ServerPool(GatewayConfig(run_id="r", model=Path("m"), trajectory_manager="m:1"))
    known = {name: server(name, weight_version=n) for n, name in enumerate("abc", start=2)}
    for each in known.values():
        assert each.info is not None
        each.info.state = pb.SERVER_STATE_SERVING
    servers._servers, servers._min_version = known, 3
    assert servers._with_room(None, 0, frozenset()) == [known["b"], known["c"]]
    assert servers._with_room(None, 4, frozenset()) == [known["c"]]
    assert servers._with_room(2, 4, frozenset()) == [known["a"]]
