"""Opening in batches: few messages, one answer per part."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from rollout.gateway.record.recorder import TurnOpener
from services.chassis.errors import Reason, ServiceError
from tests.lib.rollout.gateway.support import failed, refusal, until_idle

REFUSED = refusal(grpc.StatusCode.NOT_FOUND, "NOT_FOUND").error
FULL = refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS", retry_after=0.01).error


class Store:
    """Opens everything but what is called "bad"; answers when it may."""

    def __init__(self) -> None:
        self.messages: list[list[str]] = []
        self.failures: list[grpc.aio.AioRpcError] = []
        """Raised for whole messages, one each."""
        self.full: list[str] = []
        """Pushed back once, by name."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def BeginTurns(self, request: pb.BeginTurnsRequest) -> pb.BeginTurnsResponse:
        """See `TrajectoryService`."""
        started = [part.rollout_id for part in request.rollouts]
        self.messages.append([*started, *(part.rollout_id for part in request.turns)])
        await self.may_answer.wait()
        if self.failures:
            raise self.failures.pop(0)
        answer = pb.BeginTurnsResponse()
        for new in request.rollouts:
            if not self._refused(answer.rollouts.add(), new.rollout_id):
                answer.rollouts[-1].started.group_id = new.rollout_id
        for turn in request.turns:
            if not self._refused(answer.turns.add(), turn.rollout_id):
                answer.turns[-1].begun.epoch = len(turn.rollout_id)
        return answer

    def _refused(self, result: pb.NewRolloutResult | pb.NewTurnResult, name: str) -> bool:
        if name == "bad":
            result.error.CopyFrom(REFUSED)
        if name in self.full:
            self.full.remove(name)
            result.error.CopyFrom(FULL)
        return result.HasField("error")


@asynccontextmanager
async def opening(store: Store) -> AsyncIterator[TurnOpener]:
    """An opener in front of `store`, with one message at a time."""
    opener = TurnOpener(cast("TrajectoryServiceAsyncStub", store), max_in_flight=1)
    sending = asyncio.create_task(opener.keep_sending())
    try:
        yield opener
    finally:
        sending.cancel()


def start(rollout_id: str) -> pb.NewRollout:
    """What opens a rollout."""
    return pb.NewRollout(rollout_id=rollout_id)


def begin(rollout_id: str) -> pb.NewTurn:
    """What opens a turn."""
    return pb.NewTurn(rollout_id=rollout_id)


async def test_callers_that_come_together_share_a_message() -> None:
    """The first goes alone; each gets its own answer, whatever its kind and its place."""
    store = Store()
    store.may_answer.clear()
    async with opening(store) as opener, asyncio.TaskGroup() as group:
        first = group.create_task(opener.start(start("a")))
        await until_idle()
        begun = [group.create_task(opener.begin(begin(name))) for name in ("bb", "cccc")]
        started = group.create_task(opener.start(start("d")))
        await until_idle()
        store.may_answer.set()
    assert store.messages == [["a"], ["d", "bb", "cccc"]]
    assert (first.result().group_id, started.result().group_id) == ("a", "d")
    assert [task.result().epoch for task in begun] == [2, 4]


async def test_each_caller_gets_its_own_refusal() -> None:
    """The other parts of the message are not affected."""
    async with opening(Store()) as opener:
        started, refused, begun = await asyncio.gather(
            opener.start(start("a")),
            opener.begin(begin("bad")),
            opener.begin(begin("ccc")),
            return_exceptions=True,
        )
    assert isinstance(started, pb.StartedRollout)
    assert started.group_id == "a"
    assert isinstance(refused, ServiceError)
    assert refused.code is grpc.StatusCode.NOT_FOUND
    assert refused.reason in (Reason.NOT_FOUND, Reason.INTERNAL)
    assert isinstance(begun, pb.BegunTurn)
    assert begun.epoch == 3


async def test_what_is_pushed_back_goes_again_by_itself() -> None:
    """Its neighbours are not kept waiting."""
    store = Store()
    store.full = ["bb"]
    async with opening(store) as opener:
        answers = await asyncio.gather(opener.start(start("a")), opener.begin(begin("bb")))
    assert store.messages == [["a", "bb"], ["bb"]]
    assert (answers[0].group_id, answers[1].epoch) == ("a", 2)


async def test_after_an_outage_only_those_who_still_wait_are_opened() -> None:
    """An agent that is gone may have begun its turn elsewhere: an older attempt must not follow."""
    store = Store()
    store.failures = [failed(grpc.StatusCode.UNAVAILABLE)]
    store.may_answer.clear()
    async with opening(store) as opener:
        gone = asyncio.create_task(opener.begin(begin("gone")))
        stays = asyncio.create_task(opener.begin(begin("stays")))
        await until_idle()
        gone.cancel()
        store.may_answer.set()
        assert (await stays).epoch == 5
    assert store.messages == [["gone", "stays"], ["stays"]]


async def test_a_message_that_is_refused_is_everybodys_refusal() -> None:
    """And the next one goes out all the same."""
    store = Store()
    store.failures = [failed(grpc.StatusCode.PERMISSION_DENIED)]
    async with opening(store) as opener:
        calls = (opener.start(start(name)) for name in "ab")
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(answer, ServiceError)
            assert answer.code is grpc.StatusCode.PERMISSION_DENIED
        assert (await opener.start(start("c"))).group_id == "c"
