"""The `seamflow` command: look at a run, find out why it waits, take a node out, train, serve.

Exit codes: 0 well, 64 wrong usage, 69 a service does not answer, 78 wrong configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import grpc.aio

from seamflow.cli.arguments.parser import make_parser
from seamflow.cli.arguments.service_modules import MODULES, launch
from seamflow.cli.columns import columns
from seamflow.cli.dead_letters import dead_letters, requeue
from seamflow.cli.diagnosis import Finding, activity
from seamflow.cli.ended.ended_run import ended_status, recorded_rollouts, recorded_turns
from seamflow.cli.endpoints import Command, Endpoints, UsageError, reached, resolve
from seamflow.cli.export_run.export import export
from seamflow.cli.export_run.replay import replay
from seamflow.cli.init_project.init_project import init_project
from seamflow.cli.json_output import plain
from seamflow.cli.run_commands import delete_run, end_run, runs
from seamflow.cli.run_folders import print_run_folders
from seamflow.cli.scheduling import plan_nodes, plan_split, pool, set_policy
from seamflow.cli.snapshot import Snapshot, gather
from seamflow.cli.status import ago, all_answered, status_screen
from seamflow.cli.tail import newest_rollouts, tail
from seamflow.cli.transcripts.transcripts import write_transcripts
from seamflow.cli.why_stuck import why_stuck
from seamflow.cli.workers import save_checkpoint, update_weights
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import (
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    SeamflowError,
)
from seamflow.printable import escaped_output
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from seamflow.token_text import Decode, load_decoder, token_numbers
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

__all__ = ["main"]

_OK, _USAGE, _UNAVAILABLE, _CONFIG = 0, 64, 69, 78  # sysexits.h


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in MODULES:
        try:
            launch(arguments[0], arguments[1:])
        except UsageError as error:
            sys.exit(_error(str(error), _CONFIG))
    with escaped_output():
        code = _code_of(arguments)
    sys.exit(code)


def _code_of(arguments: Sequence[str]) -> int:
    try:
        return _run(arguments)
    except UsageError as error:
        return _error(str(error), _USAGE)
    except SeamflowError as error:
        return _error(str(error), _code(error))
    except KeyboardInterrupt:
        return _OK
    except BrokenPipeError:  # `seamflow tail … | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _OK


def _run(arguments: Sequence[str]) -> int:
    parser = make_parser(_COMMANDS)
    if not arguments:
        parser.print_help()
        return _OK
    given = parser.parse_args(arguments)
    if arguments[0] == "init":
        return init_project(given.folder)
    if given.command is runs and given.trajectory_manager is None:
        return print_run_folders(given.folder)
    run: Command = given.command
    return asyncio.run(_awaited(run(given, resolve(given))))


async def _awaited(code: Awaitable[int]) -> int:
    return await code


async def _status(given: argparse.Namespace, endpoints: Endpoints) -> int:
    if endpoints.ended and endpoints.folder and not given.json:
        print(ended_status(endpoints.folder, endpoints.ended))
        return _OK
    snapshot = await gather(endpoints)
    print(json.dumps(plain(snapshot), indent=2) if given.json else status_screen(snapshot))
    return _answered(snapshot)


async def _why_stuck(given: argparse.Namespace, endpoints: Endpoints) -> int:
    if endpoints.ended and not given.json:
        print(endpoints.ended)
        return _OK
    snapshot = await gather(endpoints, history=True)
    findings = why_stuck(snapshot)
    if given.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        print("\n".join(_render(finding, snapshot) for finding in findings))
    return _answered(snapshot)


def _render(finding: Finding, snapshot: Snapshot) -> str:
    mark = "·" if finding.normal else "!"
    since = "" if finding.since is None else f" (for {ago(snapshot.now - finding.since)})"
    return f"{mark} {finding.sentence}{since}\n    {finding.cure}"


async def _drain(given: argparse.Namespace, endpoints: Endpoints) -> int:
    request = scheduler_pb.DrainNodeRequest(node_id=given.node, drain=not given.undo)
    async with reached(endpoints, "scheduler") as channel:
        stub = async_stub(SchedulerServiceStub, channel)
        node = (await stub.DrainNode(request, timeout=10)).node
    what = "takes work again" if given.undo else "is drained: no new work, current work moves"
    print(f"{node.node_id} {what}; now assigned to {activity(node)}")
    return _OK


async def _tail(given: argparse.Namespace, endpoints: Endpoints) -> int:
    if given.rollout is None:
        return await _rollouts(endpoints)
    decoder = token_numbers if endpoints.model is None else _runs_decoder(endpoints)
    decoder = _decoder(given.model) if given.model else decoder
    if endpoints.ended and endpoints.folder:
        print("".join(recorded_turns(endpoints.folder, given.rollout, decoder, endpoints.ended)))
        return _OK
    run_id = endpoints.run_id or await _trainers_run(endpoints)
    async with reached(endpoints, "trajectory_manager") as channel:
        async for text in tail(channel, run_id, given.rollout, decoder):
            print(text, end="", flush=True)
    return _OK


async def _rollouts(endpoints: Endpoints) -> int:
    """The names that `seamflow tail` takes."""
    if endpoints.ended and endpoints.folder:
        print("\n".join(recorded_rollouts(endpoints.folder, endpoints.ended)))
        return _OK
    run_id = endpoints.run_id or await _trainers_run(endpoints)
    async with reached(endpoints, "trajectory_manager") as channel:
        async for text in newest_rollouts(channel, run_id):
            print(text)
    return _OK


async def _transcripts(given: argparse.Namespace, endpoints: Endpoints) -> int:
    decoder = _decoder(given.model) if given.model else _runs_decoder(endpoints)
    purpose = tokens_pb2.Purpose.Value(f"PURPOSE_{(given.purpose or 'unspecified').upper()}")
    run_id = endpoints.run_id or await _trainers_run(endpoints)
    async with reached(endpoints, "trajectory_manager") as channel:
        number = await write_transcripts(
            channel, run_id, given.out, decoder, purpose=purpose, newest=given.newest
        )
    print(f"{number} rollouts of run {run_id} in {given.out}")
    return _OK


def _decoder(folder: Path) -> Decode:
    try:
        return load_decoder(folder)
    except ValueError as error:
        raise UsageError(f"--model: {error}") from error


def _runs_decoder(endpoints: Endpoints) -> Decode:
    """The tokenizer of the run's model; without one, ids as numbers."""
    if endpoints.model is None:
        _progress("ids stand for text: name the model's folder with --model or --run-folder")
        return token_numbers
    try:
        return load_decoder(endpoints.model)
    except ValueError as error:
        _progress(f"ids stand for text: {error}")
        return token_numbers


async def _export(given: argparse.Namespace, endpoints: Endpoints) -> int:
    run_id = endpoints.run_id or await _trainers_run(endpoints)
    async with reached(endpoints, "trajectory_manager") as channel:
        done = await export(
            channel,
            run_id,
            given.out,
            delete=given.delete,
            committed_only=given.committed_only,
            report=_progress,
        )
    deleted = f", {done.num_deleted} rollouts deleted, {done.num_needed} still needed"
    print(
        f"{done.num_samples} new samples of run {run_id}; {given.out} holds {done.num_parts} files"
        f"{deleted if given.delete else ''}"
    )
    return _OK


async def _replay(given: argparse.Namespace, endpoints: Endpoints) -> int:
    if not given.run:
        raise UsageError("--run is missing: name a run that its trainer has created")
    async with reached(endpoints, "trajectory_manager") as channel:
        num_new = await replay(channel, given.folder, given.run, report=_progress)
    print(f"{num_new} groups recorded in run {given.run}")
    return _OK


async def _columns(given: argparse.Namespace, endpoints: Endpoints) -> int:
    run_id = endpoints.run_id or await _trainers_run(endpoints)
    async with reached(endpoints, "trajectory_manager") as channel:
        async for text in columns(channel, run_id):
            print(text)
    return _OK


async def _dead_letters(given: argparse.Namespace, endpoints: Endpoints) -> int:
    run_id = endpoints.run_id or await _trainers_run(endpoints)
    async with reached(endpoints, "trajectory_manager") as channel:
        if given.requeue:
            number = await requeue(channel, run_id, given.requeue)
            print(f"{number} of {len(given.requeue)} tasks queued again")
            return _OK
        async for text in dead_letters(channel, run_id):
            print(text)
    return _OK


def _progress(text: str) -> None:
    sys.stderr.write(f"seamflow: {text}\n")


async def _trainers_run(endpoints: Endpoints) -> str:
    async with endpoints.channel(endpoints.services["trainer"]) as channel:
        stub = async_stub(TrainerServiceStub, channel)
        try:
            return (await stub.GetStatus(trainer_pb.GetStatusRequest(), timeout=5)).run_id
        except grpc.aio.AioRpcError as error:
            raise UsageError(
                "the run is unknown: name it with --run, SEAMFLOW_RUN or --run-folder"
            ) from error


def _answered(snapshot: Snapshot) -> int:
    return _OK if all_answered(snapshot) else _UNAVAILABLE


def _code(error: SeamflowError) -> int:
    if isinstance(error, InvalidRequestError | NotFoundError):
        return _USAGE
    return _CONFIG if isinstance(error, PermissionDeniedError) else _UNAVAILABLE


def _error(message: str, code: int) -> int:
    sys.stderr.write(f"seamflow: {message}\n")
    return code


_COMMANDS: Mapping[str, Command] = {
    "status": _status,
    "why-stuck": _why_stuck,
    "drain": _drain,
    "tail": _tail,
    "transcripts": _transcripts,
    "export": _export,
    "replay": _replay,
    "dead-letters": _dead_letters,
    "columns": _columns,
    "runs": runs,
    "end-run": end_run,
    "delete-run": delete_run,
    "pool": pool,
    "set-policy": set_policy,
    "plan-nodes": plan_nodes,
    "plan-split": plan_split,
    "update-weights": update_weights,
    "save-checkpoint": save_checkpoint,
}
"""What runs each verb."""


if __name__ == "__main__":
    main()
