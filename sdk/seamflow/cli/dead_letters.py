"""Groups that left a run without being trained, and how to give their tasks another chance."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Sequence

import grpc.aio

from seamflow.cli.parser import Verbs
from seamflow.enum_names import enum_name
from seamflow.errors import decode
from seamflow.inspect.endpoints import Endpoints
from seamflow.inspect.named_run import manager_of_run
from seamflow.pages import pages
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import column_service_pb2 as column_pb
from seamflow.trajectory.v1 import task_service_pb2 as pb
from seamflow.trajectory.v1.column_service_pb2_grpc import ColumnServiceStub
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub

_SECONDS = 10.0


def register(verbs: Verbs) -> None:
    """Add `seamflow dead-letters` and `seamflow columns`."""
    about = "Groups that left without being trained."
    letters = verbs.add("dead-letters", about, _dead_letters)
    letters.add_argument(
        "--requeue", action="append", metavar="TASK", help="queue this task again; repeat"
    )
    _register_columns(verbs)


async def _dead_letters(given: argparse.Namespace, endpoints: Endpoints) -> int:
    async with manager_of_run(endpoints) as (channel, run_id):
        if given.requeue:
            number = await requeue(channel, run_id, given.requeue)
            print(f"{number} of {len(given.requeue)} tasks queued again")
            return 0
        async for text in dead_letters(channel, run_id):
            print(text)
    return 0


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


def _register_columns(verbs: Verbs) -> None:
    """Add `seamflow columns`."""
    verbs.add("columns", "Which columns the samples that wait for training have.", _columns)


async def _columns(_given: argparse.Namespace, endpoints: Endpoints) -> int:
    async with manager_of_run(endpoints) as (channel, run_id):
        async for text in columns(channel, run_id):
            print(text)
    return 0


async def columns(channel: grpc.aio.Channel, run_id: str) -> AsyncIterator[str]:
    """A line for each sample of complete groups that is not committed.

    Raises:
        grpc.aio.AioRpcError: the trajectory manager rejects the request, or does not answer.
    """
    stub = async_stub(ColumnServiceStub, channel)
    request = column_pb.ListSampleStatusRequest(run_id=run_id)
    async for page in pages(lambda page: stub.ListSampleStatus(page, timeout=_SECONDS), request):
        for sample in page.samples:
            yield _sample_line(sample)


def _sample_line(sample: column_pb.SampleStatus) -> str:
    written = ", ".join(sample.ready_columns) or "none"
    leased = f"; computed now: {', '.join(sample.leased_columns)}" if sample.leased_columns else ""
    step = f"; leased for step {sample.leased_step}" if sample.leased_step else ""
    return f"{sample.sample_id}  columns written: {written}{leased}{step}"
