"""A repeated call gets the turn of the first."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1.trajectory_pb2 import Trajectory, Turn

from rollout.http_gateway.turn_ids import TurnIds

PATH = "/rollouts/r/v1/chat/completions"
STOP = tokens_pb2.FINISH_REASON_STOP
RETRY = {"x-stainless-retry-count": "1"}


class Recorded:
    """A rollout with these turns; counts how often its record is read."""

    rollout_id = "r"

    def __init__(self, *turns: Turn) -> None:
        self.turns = turns
        self.num_reads = 0

    async def trajectory(self) -> Trajectory:
        """The record."""
        self.num_reads += 1
        return Trajectory(turns=self.turns)


def call(path: str = PATH, **headers: str) -> web.Request:
    """A request on a connection that is open."""
    transport = mock.Mock(**{"is_closing.return_value": False})
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return make_mocked_request("POST", path, named, transport=transport)


async def of(ids: TurnIds, request: web.Request, rollout: Any, body: bytes = b"{}") -> str:
    """The turn of the call."""
    return await ids.of(request, body, rollout)


@pytest.mark.parametrize("key", ["a", "Call_1.~:@+=/-", "x" * 128])
async def test_an_idempotency_key_is_the_name(key: str) -> None:
    """As it is; the record is not read."""
    rollout = Recorded()
    assert await of(TurnIds(), call(Idempotency_Key=key, **RETRY), rollout) == key
    assert rollout.num_reads == 0


@pytest.mark.parametrize("key", ["-a", "a b", "x" * 129, "ä"])
async def test_a_key_that_is_no_name_is_hashed(key: str) -> None:
    """The same key gives the same turn, another one another."""
    first, again, other = [
        await of(TurnIds(), call(Idempotency_Key=each), Recorded())
        for each in (key, key, f"{key}!")
    ]
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert first == again != other


async def test_calls_without_a_key_have_turns_of_their_own() -> None:
    """That begin with a digest of route and body; nothing is read unless it is a retry."""
    ids, rollout = TurnIds(), Recorded()
    names = [await of(ids, call(), rollout) for _ in range(2)]
    names.append(await of(ids, call(x_stainless_retry_count="0"), rollout))
    assert len({*names}) == 3
    assert len({name.partition(".")[0] for name in names}) == 1
    others = [
        await of(ids, call(), rollout, b"[]"),
        await of(ids, call("/rollouts/r/v1/messages"), rollout),
    ]
    assert len({name.partition(".")[0] for name in (names[0], *others)}) == 3
    assert rollout.num_reads == 0


async def test_a_retry_continues_the_newest_turn_of_the_same_call() -> None:
    """One that still runs first; the control: a call that is no retry gets a new one."""
    ids = TurnIds()
    first, second = [await of(ids, call(), Recorded()) for _ in range(2)]
    ended = [Turn(turn_id=name, finish_reason=STOP) for name in (first, second)]
    assert await of(ids, call(**RETRY), Recorded(*ended)) == second
    running = [Turn(turn_id=first), ended[1]]
    assert await of(ids, call(**RETRY), Recorded(*running)) == first
    assert await of(ids, call(), Recorded(*running)) not in (first, second)


async def test_a_retry_of_another_call_gets_a_new_turn() -> None:
    """Turns of other bodies and other clients are left alone."""
    ids = TurnIds()
    other = await of(ids, call(), Recorded(), b"[]")
    found = await of(ids, call(**RETRY), Recorded(Turn(turn_id=other), Turn(turn_id="mine")))
    assert found not in (other, "mine")


async def test_a_turn_that_somebody_waits_for_is_not_given_away() -> None:
    """Two equal calls at the same time are two turns, until the first one's connection closes."""
    ids = TurnIds()
    waiting = call()
    name = await of(ids, waiting, Recorded())
    with ids.live("r", name, waiting):
        assert await of(ids, call(**RETRY), Recorded(Turn(turn_id=name))) != name
        waiting.transport.is_closing.return_value = True  # type: ignore[union-attr]
        assert await of(ids, call(**RETRY), Recorded(Turn(turn_id=name))) == name
    waiting.transport.is_closing.return_value = False  # type: ignore[union-attr]
    assert await of(ids, call(**RETRY), Recorded(Turn(turn_id=name))) == name


async def test_the_end_of_a_first_call_leaves_its_retry_registered() -> None:
    """Or a third one would take the turn from the second."""
    ids, first, second = TurnIds(), call(), call(**RETRY)
    name = await of(ids, first, Recorded())
    with ids.live("r", name, first):
        stays = ids.live("r", name, second)
        stays.__enter__()
    assert await of(ids, call(**RETRY), Recorded(Turn(turn_id=name))) != name
    stays.__exit__(None, None, None)
    assert await of(ids, call(**RETRY), Recorded(Turn(turn_id=name))) == name
