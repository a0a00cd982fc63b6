"""Groups that left a run without being trained, and how to give their tasks another chance."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc.aio

from seamflow.enum_names import enum_name
from seamflow.errors import decode
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import task_service_pb2 as pb
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub

__all__ = ["dead_letters", "requeue"]

_SECONDS = 10.0


async def dead_letters(channel: grpc.aio.Channel, run_id: str) -> AsyncIterator[str]:
    """A paragraph for each dead letter of a run, oldest first.

    Raises:
        SeamflowError: the trajectory manager rejects the request, or does not answer.
    """
    stub = async_stub(TaskServiceStub, channel)
    request = pb.ListDeadLettersRequest(run_id=run_id)
    while True:
        try:
            page = await stub.ListDeadLetters(request, timeout=_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise decode(error) from error
        for letter in page.dead_letters:
            yield _render(letter)
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


async def requeue(channel: grpc.aio.Channel, run_id: str, task_ids: Sequence[str]) -> int:
    """Queue the tasks of dead letters again; return how many there were.

    Raises:
        SeamflowError: the trajectory manager rejects the request, or does not answer.
    """
    stub = async_stub(TaskServiceStub, channel)
    request = pb.RequeueDeadLettersRequest(run_id=run_id, task_ids=task_ids)
    try:
        return (await stub.RequeueDeadLetters(request, timeout=_SECONDS)).num_requeued
    except grpc.aio.AioRpcError as error:
        raise decode(error) from error


def _render(letter: pb.DeadLetter) -> str:
    reason = enum_name(pb.DeadLetterReason, letter.reason).lower().replace("_", " ")
    when = letter.discard_time.ToDatetime().isoformat(sep=" ", timespec="seconds")
    rollouts = " ".join(letter.rollout_ids)
    return f"{letter.task.task_id}  {reason}, {when} UTC\n    {letter.message}\n    {rollouts}"
