"""LeaseTasks over real gRPC: waiting, several leases, repeated requests, agents' own tasks."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import task_service_pb2, trajectory_pb2

from tests.lib.trajectory_manager.client import Client, reason_of


def own(task_id: str = "mine", **fields: object) -> trajectory_pb2.Task:
    """An agent's own task."""
    given = {"purpose": tokens_pb2.PURPOSE_TRAIN, **fields}
    return trajectory_pb2.Task(task_id=task_id, **given)  # type: ignore[arg-type]


async def test_a_lost_answer_loses_no_lease(replicas: tuple[Client, Client]) -> None:
    """The repeated request gets the same leases of another replica, and more if there are more."""
    first, second = replicas
    await first.submit("a")
    answer = await first.ask(most=3, request_id="r")
    assert [lease.rollout_id for lease in answer.leases] == ["a/0/1", "a/1/1"]
    assert await second.ask(most=3, request_id="r") == answer
    await second.submit("b")
    more = (await second.ask(most=3, request_id="r")).leases
    assert [lease.rollout_id for lease in more] == ["a/0/1", "a/1/1", "b/0/1"]
    (other,) = (await second.ask(request_id="other")).leases
    assert other.rollout_id == "b/1/1"
    assert other.lease_token not in [lease.lease_token for lease in more]


async def test_a_request_without_an_id_is_rejected(replicas: tuple[Client, Client]) -> None:
    """It could not be repeated."""
    request = task_service_pb2.LeaseTasksRequest(run_id=replicas[0].run_id)
    with pytest.raises(grpc.aio.AioRpcError, match="request_id"):
        await replicas[0].tasks.LeaseTasks(request)


async def test_an_own_task_is_admitted_and_trained(replicas: tuple[Client, Client]) -> None:
    """Its group is full once all its rollouts are leased; others never get them."""
    first, second = replicas
    task = own(payload_json='{"a": 1}', labels={"suite": "x"})
    leases = [(await first.ask(task=task)).leases[0] for _ in range(2)]
    assert [lease.rollout_id for lease in leases] == ["mine/0/1", "mine/1/1"]
    assert leases[0].task.num_samples == 2
    assert (leases[0].task.payload_json, dict(leases[0].task.labels)) == (
        '{"a": 1}',
        {"suite": "x"},
    )
    assert (await second.ask()).empty_reason == trajectory_pb2.EMPTY_REASON_NOTHING_QUEUED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await second.ask(task=task, wait=5)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(caught.value) == "GROUP_FULL"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await second.ask(task=own(num_samples=5))
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_an_own_task_waits_until_it_is_admitted(replicas: tuple[Client, Client]) -> None:
    """Or until its time is up; then admission is the reason."""
    first, second = replicas
    await first.submit("a", "b")
    for _ in range(4):
        await first.play()
    empty = await first.ask(task=own(), wait=1)
    assert (len(empty.leases), empty.empty_reason) == (
        0,
        trajectory_pb2.EMPTY_REASON_ADMISSION_CLOSED,
    )
    waiting = asyncio.create_task(first.ask(task=own(), wait=30))
    epoch = await second.reconcile()
    await second.lease_samples(epoch, 1, wait=5)
    assert (await waiting).leases[0].rollout_id == "mine/0/1"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"task": own(purpose=tokens_pb2.PURPOSE_EVAL)}, "task.purpose"),
        ({"task": own(task_id="")}, "task.task_id"),
        ({"task": own(payload_json="[]")}, "task.payload_json"),
        ({"task": own(labels={"": "x"})}, "task.labels"),
        ({"task": own(), "purpose": tokens_pb2.PURPOSE_TRAIN}, "purpose"),
        ({"task": own(), "max_leases": 1}, "max_leases"),
        ({"wait": Duration(seconds=-1)}, "wait"),
    ],
)
async def test_wrong_requests_are_named(
    replicas: tuple[Client, Client], change: dict[str, object], field: str
) -> None:
    """By the field at fault."""
    request = task_service_pb2.LeaseTasksRequest(
        run_id=replicas[0].run_id,
        request_id="r",
        **change,  # type: ignore[arg-type]
    )
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        await replicas[0].tasks.LeaseTasks(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_waiting_agent_gets_the_next_task(replicas: tuple[Client, Client]) -> None:
    """LeaseTasks waits for work, and answers empty when its time is up."""
    first, second = replicas
    assert not (await first.lease()).HasField("task")
    waiting = asyncio.create_task(first.lease(wait=30))
    await second.submit("a")
    lease = await waiting
    assert (lease.task.task_id, lease.task.num_samples) == ("a", 2)
    assert lease.lease_duration.seconds == 60


async def test_several_rollouts_are_leased_at_once(replicas: tuple[Client, Client]) -> None:
    """Up to the number available, each under its own lease; one by default."""
    first, second = replicas
    await first.submit("a", "b")
    answer = await first.ask(most=3)
    assert len((await second.ask()).leases) == 1
    assert not (await second.ask(most=3)).leases
    leases = [(lease.rollout_id, lease.lease_token) for lease in answer.leases]
    assert [name for name, _ in leases] == ["a/0/1", "a/1/1", "b/0/1"]
    assert [lease.task.task_id for lease in answer.leases] == ["a", "a", "b"]
    for name, token in leases:
        await second.start(name, token)
        with pytest.raises(grpc.aio.AioRpcError):
            await second.start(name, leases[0][1] if token != leases[0][1] else leases[1][1])


@pytest.mark.parametrize("most", [-1, 9])
async def test_a_number_of_leases_out_of_bounds_is_rejected(
    replicas: tuple[Client, Client], most: int
) -> None:
    """By its name, whether there is work or not."""
    with pytest.raises(grpc.aio.AioRpcError, match="max_leases") as caught:
        await replicas[0].ask(most=most)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
