"""Ended turns of a real trajectory manager: each once, whatever happens to the list."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub


import grpc.aio
from seamflow.common.v1 import tokens_pb2
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.task_service_pb2 import LeaseTasksRequest, SubmitTasksRequest
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_pb2 import Task

from bench.harness.store_calls import send_async
from services.ranker.turn_feed import EndedTurn, TurnFeed, ended_turns
from tests.lib.ranker.support import group, manager, record, turn


async def read(feed: TurnFeed) -> list[EndedTurn]:
    """All that is new."""
    return [ended async for ended in feed.ended()]


async def test_each_closed_rollout_is_read_once() -> None:
    """In the order of the list, over several reads."""
    async with manager("run") as (_, stub):
        feed = TurnFeed(stub, "run")
        assert await read(feed) == []
        for first in (0, 40):
            groups = [group(f"{i}", [turn("a", [i, 1], 3 + i)]) for i in range(first, first + 40)]
            await record(stub, "run", groups)
            turns = await read(feed)
            assert [t.start.task_id for t in turns] == [f"{i}" for i in range(first, first + 40)]
            assert [t.num_tokens for t in turns] == [3 + i for i in range(first, first + 40)]
            assert await read(feed) == []


async def test_turns_of_a_rollout_know_what_they_continue() -> None:
    """The prompt of a later turn is the whole sequence so far, without what was left out."""
    turns = [turn("a", [1, 2], 3), turn("b", [4], 2, parent="a", prefix=4)]
    async with manager("run") as (_, stub):
        await record(stub, "run", [group("task", turns)])
        first, second = await read(TurnFeed(stub, "run"))
    assert (list(first.start.token_ids), first.num_tokens) == ([1, 2], 3)
    assert (list(second.start.token_ids), second.num_tokens) == ([1, 2, 7, 7, 4], 2)
    assert (first.start.turn_index, second.start.turn_index) == (0, 1)


async def test_a_list_that_has_become_shorter_is_read_on() -> None:
    """Old groups were deleted, new ones came: the new ones are read, and no other one again."""
    async with manager("run") as (_, stub):
        feed = TurnFeed(stub, "run")
        await record(stub, "run", [group(f"{i}", [turn("a", [i], 5)]) for i in range(30)])
        assert len(await read(feed)) == 30
        shorter = Shorter(stub, 20)
        feed._closed._store = cast("TrajectoryServiceAsyncStub", shorter)
        await record(stub, "run", [group(f"{i}", [turn("a", [i], 5)]) for i in range(30, 45)])
        turns = await read(feed)
        assert [t.start.task_id for t in turns] == [f"{i}" for i in range(30, 45)]
        assert await read(feed) == []


async def test_a_new_feed_begins_with_the_newest() -> None:
    """A restart does not read a whole run again."""
    async with manager("run") as (_, stub):
        await record(stub, "run", [group(f"{i}", [turn("a", [i], 5)]) for i in range(60)])
        turns = await read(TurnFeed(stub, "run", max_rollouts=10))
        assert [t.start.task_id for t in turns] == [f"{i}" for i in range(50, 60)]


async def test_a_running_rollout_is_read_when_it_closes_and_eval_never() -> None:
    """It does not block the others."""
    async with manager("run") as (address, stub):
        feed = TurnFeed(stub, "run")
        async with grpc.aio.insecure_channel(address) as channel:
            running = await started_rollout(channel, stub)
        evaluated = pb.NewRollout(
            run_id="run",
            rollout_id="eval",
            purpose=tokens_pb2.PURPOSE_EVAL,
            credential_digest="0" * 64,
        )
        await send_async(stub, evaluated)
        await record(stub, "run", [group("later", [turn("a", [9], 5)])])
        assert [t.start.task_id for t in await read(feed)] == ["later"]
        finish = pb.RolloutFinish(
            run_id="run",
            rollout_id=running,
            credential_digest="0" * 64,
            failure=tokens_pb2.Failure(failure_class=tokens_pb2.FAILURE_CLASS_ENVIRONMENT),
        )
        await send_async(stub, finish)
        assert await read(feed) == []  # it had no turn
        assert feed._closed._start == 3


async def test_turns_that_did_not_end_by_themselves_tell_nothing() -> None:
    """One that was cancelled, or that sampled nothing."""
    spans = [tokens_pb2.Span(num_tokens=2, origin=tokens_pb2.ORIGIN_POLICY)]
    tokens = tokens_pb2.Tokens(token_ids=[1, 2], spans=spans)
    reasons = [
        tokens_pb2.FINISH_REASON_CANCELLED,
        tokens_pb2.FINISH_REASON_UNSPECIFIED,
        tokens_pb2.FINISH_REASON_LENGTH,
    ]
    trajectory = trajectory_pb2.Trajectory(
        group_id="task",
        turns=[
            trajectory_pb2.Turn(turn_id=f"{reason}", tokens=tokens, finish_reason=reason)
            for reason in reasons
        ],
    )
    assert [ended.num_tokens for ended in ended_turns(trajectory)] == [2]


class Shorter:
    """A store whose list has lost its first rollouts."""

    def __init__(self, stub: TrajectoryServiceAsyncStub, num_lost: int) -> None:
        self._stub = stub
        self._num_lost = num_lost
        self.GetTrajectory = stub.GetTrajectory

    async def ListTrajectories(
        self, request: pb.ListTrajectoriesRequest
    ) -> pb.ListTrajectoriesResponse:
        """From a later place."""
        asked = pb.ListTrajectoriesRequest()
        asked.CopyFrom(request)
        asked.page_token = str(int(request.page_token or 0) + self._num_lost)
        return await self._stub.ListTrajectories(asked)


async def started_rollout(channel: grpc.aio.Channel, stub: TrajectoryServiceAsyncStub) -> str:
    """A leased rollout without a turn; its name."""
    tasks = async_stub(TaskServiceStub, channel)
    task = Task(task_id="task", payload_json="{}", purpose=tokens_pb2.PURPOSE_TRAIN)
    await tasks.SubmitTasks(SubmitTasksRequest(run_id="run", tasks=[task]))
    request = LeaseTasksRequest(run_id="run", request_id="r")
    (lease,) = (await tasks.LeaseTasks(request)).leases
    start = pb.NewRollout(
        run_id="run",
        rollout_id=lease.rollout_id,
        lease_token=lease.lease_token,
        purpose=tokens_pb2.PURPOSE_TRAIN,
        credential_digest="0" * 64,
    )
    await send_async(stub, start)
    name: str = lease.rollout_id
    return name
