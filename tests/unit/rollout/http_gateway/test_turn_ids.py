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

from rollout.http_gateway import turn_ids
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


async def answered(ids: TurnIds, *, arrives: bool = True, given: web.Request | None = None) -> str:
    """The turn of a call whose answer arrives, or does not."""
    request = given or call()
    name = await of(ids, request, Recorded())
    with ids.call("r", name, request, lambda: arrives):
        pass
    return name


def ended(*names: str) -> list[Turn]:
    """Recorded turns that have ended."""
    return [Turn(turn_id=name, finish_reason=STOP) for name in names]


async def test_a_retry_continues_the_turn_whose_answer_did_not_arrive() -> None:
    """One that still runs first; the control: a call that is no retry gets a new one."""
    ids = TurnIds()
    first, second = [await answered(ids, arrives=False) for _ in range(2)]
    whole = ended(first, second)
    assert await of(ids, call(**RETRY), Recorded(*whole)) == second
    running = [Turn(turn_id=first), whole[1]]
    assert await of(ids, call(**RETRY), Recorded(*running)) == first
    assert await of(ids, call(), Recorded(*running)) not in (first, second)


async def test_a_retry_of_a_refused_call_is_a_new_sample() -> None:
    """Its first try began no turn: an answer that has arrived is nobody's to repeat."""
    ids = TurnIds()
    name = await answered(ids)
    assert await of(ids, call(**RETRY), Recorded(*ended(name))) != name


async def test_an_answer_is_repeated_once() -> None:
    """Of two retries one had begun the turn; the other one is a new sample."""
    ids, retry = TurnIds(), call(**RETRY)
    name = await answered(ids, arrives=False)
    recorded = Recorded(*ended(name))
    assert await of(ids, retry, recorded) == name
    with ids.call("r", name, retry, lambda: True):
        assert await of(ids, call(**RETRY), recorded) != name
    assert await of(ids, call(**RETRY), recorded) != name


async def test_an_answer_on_a_connection_that_has_closed_has_not_arrived() -> None:
    """The client had left before it was sent."""
    ids, left = TurnIds(), call()
    left.transport.is_closing.return_value = True  # type: ignore[union-attr]
    name = await answered(ids, given=left)
    assert await of(ids, call(**RETRY), Recorded(*ended(name))) == name


async def test_an_error_is_no_answer() -> None:
    """The same call continues the turn."""
    ids, request = TurnIds(), call()
    name = await of(ids, request, Recorded())
    with pytest.raises(RuntimeError), ids.call("r", name, request, lambda: True):
        raise RuntimeError
    assert await of(ids, call(**RETRY), Recorded(*ended(name))) == name


async def test_a_turn_of_another_process_is_taken_if_it_is_without_doubt() -> None:
    """Each that still runs; a finished one if no other is equal to it, and none continues it."""
    one, two = [await of(TurnIds(), call(), Recorded()) for _ in range(2)]
    ids = TurnIds()
    assert await of(ids, call(**RETRY), Recorded(*ended(one))) == one
    assert await of(ids, call(**RETRY), Recorded(Turn(turn_id=one), *ended(two))) == one
    assert await of(ids, call(**RETRY), Recorded(*ended(one, two))) not in (one, two)
    next_turn = Turn(turn_id="next", prefix_turn_id=one)
    assert await of(ids, call(**RETRY), Recorded(*ended(one), next_turn)) != one


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
    with ids.call("r", name, waiting, lambda: False):
        assert await of(ids, call(**RETRY), Recorded(Turn(turn_id=name))) != name
        waiting.transport.is_closing.return_value = True  # type: ignore[union-attr]
        assert await of(ids, call(**RETRY), Recorded(Turn(turn_id=name))) == name
    waiting.transport.is_closing.return_value = False  # type: ignore[union-attr]
    assert await of(ids, call(**RETRY), Recorded(Turn(turn_id=name))) == name


async def test_the_end_of_a_first_call_leaves_its_retry_registered() -> None:
    """Or a third one would take the turn from the second."""
    ids, first, second = TurnIds(), call(), call(**RETRY)
    name = await of(ids, first, Recorded())
    with ids.call("r", name, first, lambda: False):
        stays = ids.call("r", name, second, lambda: False)
        stays.__enter__()
    assert await of(ids, call(**RETRY), Recorded(Turn(turn_id=name))) != name
    stays.__exit__(None, None, None)
    assert await of(ids, call(**RETRY), Recorded(Turn(turn_id=name))) == name


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that never ask again are forgotten, the oldest first."""
    monkeypatch.setattr(turn_ids, "_MAX_UNANSWERED", 2)
    ids = TurnIds()
    names = [await answered(ids, arrives=False) for _ in range(3)]
    assert await of(ids, call(**RETRY), Recorded(*ended(*names[:1]))) != names[0]
    assert await of(ids, call(**RETRY), Recorded(*ended(*names))) == names[2]
