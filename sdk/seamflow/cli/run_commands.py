"""Commands on runs: list them, end one, delete what is stored of one."""

from __future__ import annotations

import argparse
from pathlib import Path

from seamflow.cli.parser import Verbs, call_services
from seamflow.inspect.endpoints import Endpoints, reached
from seamflow.inspect.run_folders import print_run_folders
from seamflow.pages import pages
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub

_DELETE_SECONDS = 3600.0


def register(verbs: Verbs) -> None:
    """Add `seamflow runs`, `end-run` and `delete-run`."""
    listing = verbs.add(
        "runs", "The run folders here; with --trajectory-manager, the runs that it keeps.", runs
    )
    listing.add_argument("--folder", type=Path, default=Path("runs"), help="of run folders (runs)")
    listing.set_defaults(command=_runs)
    ending = verbs.add("end-run", "Give agents no more tasks of a run.", end_run)
    deleting = verbs.add("delete-run", "Delete all that is stored of an ended run.", delete_run)
    for named in (ending, deleting):
        named.add_argument("name", metavar="RUN")


def _runs(given: argparse.Namespace) -> int:
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
