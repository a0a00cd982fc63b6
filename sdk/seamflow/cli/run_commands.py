"""Commands on runs: list them, end one, delete one; what left a run untrained, and its columns."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio

from seamflow.cli.parser import Verbs, call_services
from seamflow.enum_names import enum_name
from seamflow.errors import decode
from seamflow.inspect.endpoints import Endpoints, manager_of_run, reached
from seamflow.inspect.run_folders import print_run_folders, write_note
from seamflow.pages import pages
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import column_service_pb2 as column_pb
from seamflow.trajectory.v1 import run_service_pb2 as pb
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.column_service_pb2_grpc import ColumnServiceStub
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub

_DELETE_SECONDS = 3600.0

_SECONDS = 10.0


def register(verbs: Verbs) -> None:
    """Add `seamflow dead-letters`, `columns`, `runs`, `end-run` and `delete-run`."""
    _register_dead_letters(verbs)
    verbs.add("columns", "Which columns the samples that wait for training have.", _columns)
    listing = verbs.add(
        "runs", "The run folders here; with --trajectory-manager, the runs that it keeps.", runs
    )
    listing.add_argument("--folder", type=Path, default=Path("runs"), help="of run folders (runs)")
    listing.add_argument(
        "--note", nargs=2, metavar=("RUN", "TEXT"), help="note TEXT of a run; #words are tags"
    )
    listing.set_defaults(command=_runs)
    ending = verbs.add("end-run", "Give agents no more tasks of a run.", end_run)
    deleting = verbs.add("delete-run", "Delete all that is stored of an ended run.", delete_run)
    for named in (ending, deleting):
        named.add_argument("name", metavar="RUN")


def _runs(given: argparse.Namespace) -> int:
    if given.note:
        write_note(given.folder / given.note[0], given.note[1])
    if given.trajectory_manager is None:
        return print_run_folders(given.folder)
    return call_services(runs, given)


async def runs(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Print the runs that the trajectory manager keeps."""
    async with reached(endpoints, "trajectory_manager") as channel:
        stub = async_stub(RunServiceStub, channel)
        async for page in pages(stub.ListRuns, pb.ListRunsRequest()):
            for run in page.runs:
                print(_line(run))
    return 0


async def end_run(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """End a run: agents get no more tasks. A trainer that starts again continues it."""
    async with reached(endpoints, "trajectory_manager") as channel:
        stub = async_stub(RunServiceStub, channel)
        request = pb.EndRunRequest(run_id=given.name)
        await retrying(lambda: stub.EndRun(request), timeout=60)
    print(f"run {request.run_id} has ended")
    return 0


async def delete_run(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Delete all that the trajectory manager stores of an ended run."""
    async with reached(endpoints, "trajectory_manager") as channel:
        stub = async_stub(RunServiceStub, channel)
        request = pb.DeleteRunRequest(run_id=given.name)
        answer = await retrying(
            lambda: stub.DeleteRun(request, timeout=_DELETE_SECONDS), timeout=_DELETE_SECONDS
        )
    print(f"run {request.run_id} is deleted, with {answer.num_rollouts} rollouts")
    return 0


def _line(run: trajectory_pb2.Run) -> str:
    state = trajectory_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()
    created = run.create_time.ToDatetime().isoformat(sep=" ", timespec="seconds")
    labels = "".join(f"  {name}={value}" for name, value in sorted(run.config.labels.items()))
    return f"{run.run_id}  {state}, step {run.committed_step}, created {created} UTC{labels}"


def _register_dead_letters(verbs: Verbs) -> None:
    about = "Groups that left without being trained."
    letters = verbs.add("dead-letters", about, _dead_letters)
    letters.add_argument(
        "--requeue", action="append", metavar="TASK", help="queue this task again; repeat"
    )


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
    request = task_pb.ListDeadLettersRequest(run_id=run_id)
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
    request = task_pb.RequeueDeadLettersRequest(run_id=run_id, task_ids=task_ids)
    try:
        return (await stub.RequeueDeadLetters(request, timeout=_SECONDS)).num_requeued
    except grpc.aio.AioRpcError as error:
        raise decode(error) from error


def _render(letter: task_pb.DeadLetter) -> str:
    reason = enum_name(task_pb.DeadLetterReason, letter.reason).lower().replace("_", " ")
    when = letter.discard_time.ToDatetime().isoformat(sep=" ", timespec="seconds")
    rollouts = " ".join(letter.rollout_ids)
    return f"{letter.task.task_id}  {reason}, {when} UTC\n    {letter.message}\n    {rollouts}"


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
