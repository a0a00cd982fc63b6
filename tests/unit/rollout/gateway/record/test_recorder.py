"""Recording in batches: few messages, one answer per append, nothing lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from rollout.gateway.record import recorder as module
from rollout.gateway.record.recorder import Recorder
from services.chassis.errors import Reason, ServiceError
from tests.lib.rollout.gateway.support import FakeStore, failed, refusal, until_idle

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub


@asynccontextmanager
async def recording(store: FakeStore, **bounds: int) -> AsyncIterator[Recorder]:
    """A recorder that sends to `store`."""
    stub = cast("TrajectoryServiceAsyncStub", store)
    recorder = Recorder(stub, **({"max_in_flight": 1} | bounds))
    sending = asyncio.create_task(recorder.keep_sending())
    try:
        yield recorder
    finally:
        sending.cancel()


def append(turn_id: str, num_tokens: int = 1, offset: int = 0) -> pb.TokenAppend:
    """Some tokens for a turn."""
    tokens = tokens_pb2.PackedTokens(token_ids=bytes(4 * num_tokens))
    return pb.TokenAppend(turn_id=turn_id, offset=offset, tokens=tokens)


def sent(store: FakeStore) -> list[list[str]]:
    """The turns of each message."""
    return [[append.turn_id for append in message] for message in store.messages]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The delays that callers were asked to wait; they do not wait."""
    delays: list[float | None] = []

    class NoBackoff:
        async def wait(self, at_least: float | None = None) -> None:
            delays.append(at_least)

    monkeypatch.setattr(module, "Backoff", NoBackoff)
    monkeypatch.setattr("seamflow.retry.Backoff", NoBackoff)
    return delays


async def test_what_comes_while_a_message_is_in_flight_is_the_next_one() -> None:
    """The first append goes at once and alone; those that wait share a message, in order."""
    store = FakeStore()
    store.may_answer.clear()
    async with recording(store) as recorder, asyncio.TaskGroup() as group:
        first = group.create_task(recorder.record(append("a", 3)))
        await until_idle()
        others = [group.create_task(recorder.record(append(name, 2, 7))) for name in "bcd"]
        await until_idle()
        assert sent(store) == [["a"]]
        assert not first.done()
        store.may_answer.set()
    assert (sent(store), store.max_in_flight) == ([["a"], ["b", "c", "d"]], 1)
    assert [first.result(), *(task.result() for task in others)] == [3, 9, 9, 9]


async def test_idle_senders_share_what_waits() -> None:
    """Callers that come together go out in as many messages as may be under way."""
    store = FakeStore()
    store.may_answer.clear()
    async with recording(store, max_in_flight=2) as recorder, asyncio.TaskGroup() as group:
        for name in "abcde":
            group.create_task(recorder.record(append(name)))
        await until_idle()
        assert sent(store) == [["a", "b", "c"], ["d", "e"]]
        store.may_answer.set()
    assert store.max_in_flight == 2


async def test_each_caller_gets_its_own_refusal() -> None:
    """A stale writer gets an error; the other parts of its message are stored."""
    store = FakeStore()
    store.results["b"] = [refusal(grpc.StatusCode.ABORTED, "STALE_EPOCH")]
    store.results["c"] = [refusal(grpc.StatusCode.FAILED_PRECONDITION, "OFFSET_GAP")]
    async with recording(store) as recorder:
        calls = (recorder.record(append(name)) for name in "abcd")
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sent(store) == [["a", "b", "c", "d"]]
    assert [answers[0], answers[3]] == [1, 1]
    refused = [(e.code, e.reason) for e in answers if isinstance(e, ServiceError)]
    assert refused == [
        (grpc.StatusCode.ABORTED, Reason.STALE_EPOCH),
        (grpc.StatusCode.FAILED_PRECONDITION, Reason.OFFSET_GAP),
    ]


async def test_an_append_that_is_pushed_back_goes_again(waits: list[float | None]) -> None:
    """Back-pressure and an unavailable store delay a caller by the retry time."""
    store = FakeStore()
    store.results["b"] = [
        refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL", retry_after=7),
        refusal(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"),
    ]
    async with recording(store) as recorder:
        assert await asyncio.gather(*(recorder.record(append(n)) for n in "abc")) == [1, 1, 1]
    assert sent(store) == [["a", "b", "c"], ["b"], ["b"]]
    assert waits == [7, None]


async def test_a_message_that_fails_goes_again_as_it_is(waits: list[float | None]) -> None:
    """Appends are idempotent by offset; callers do not notice a restart."""
    store = FakeStore()
    store.failures = [failed(grpc.StatusCode.UNAVAILABLE)] * 2
    async with recording(store) as recorder:
        assert await asyncio.gather(*(recorder.record(append(n)) for n in "ab")) == [1, 1]
    assert sent(store) == [["a", "b"]] * 3


async def test_a_message_that_is_refused_is_everybodys_refusal() -> None:
    """And the next message goes out all the same."""
    store = FakeStore()
    store.failures = [failed(grpc.StatusCode.PERMISSION_DENIED)]
    async with recording(store) as recorder:
        calls = (recorder.record(append(name)) for name in "ab")
        answers: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        assert [answer.code for answer in answers] == [grpc.StatusCode.PERMISSION_DENIED] * 2
        assert await recorder.record(append("a")) == 1


async def test_messages_are_bounded() -> None:
    """What does not fit goes with the next message; what fits in none goes alone."""
    store = FakeStore()
    size = append("a", 100).ByteSize()
    async with recording(store, max_message_bytes=2 * size) as recorder:
        await asyncio.gather(
            *(recorder.record(append(name, 100)) for name in "abc"),
            recorder.record(append("d", 1000)),
            recorder.record(append("e")),
        )
    assert sent(store) == [["a", "b"], ["c"], ["d"], ["e"]]


async def test_callers_wait_while_too_much_waits() -> None:
    """With them their streams of tokens: nothing piles up in the gateway."""
    store = FakeStore()
    store.may_answer.clear()
    size = append("a", 100).ByteSize()
    async with (
        recording(store, max_message_bytes=size, max_waiting_bytes=2 * size) as recorder,
        asyncio.TaskGroup() as group,
    ):
        for name in "abcdef":
            group.create_task(recorder.record(append(name, 100)))
        await until_idle()
        assert len(recorder._batcher._waiting) == 1  # and one is under way
        store.may_answer.set()
    assert sorted(name for message in sent(store) for name in message) == list("abcdef")


async def test_what_nobody_waits_for_is_not_sent() -> None:
    """An agent that is gone takes its append along, unless it is under way."""
    store = FakeStore()
    store.may_answer.clear()
    async with recording(store) as recorder:
        tasks = [asyncio.create_task(recorder.record(append("a")))]
        await until_idle()
        tasks += [asyncio.create_task(recorder.record(append(name))) for name in "bc"]
        await until_idle()
        tasks[0].cancel()
        tasks[1].cancel()
        store.may_answer.set()
        assert await tasks[2] == 1
        assert await recorder.record(append("d")) == 1
    assert sent(store) == [["a"], ["c"], ["d"]]
    assert recorder._batcher._num_bytes == 0


async def test_appends_of_one_turn_keep_their_order() -> None:
    """Also where they are not awaited one by one."""
    store = FakeStore()
    async with recording(store, max_message_bytes=100) as recorder:
        calls = (recorder.record(append("a", 10, offset=10 * i)) for i in range(9))
        await asyncio.gather(*calls)
    offsets = [append.offset for message in store.messages for append in message]
    assert offsets == list(range(0, 90, 10))
    assert len(store.messages) > 1
