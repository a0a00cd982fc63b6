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
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

import grpc.aio

from seamflow import __version__
from seamflow.cli.columns import columns
from seamflow.cli.dead_letters import dead_letters, requeue
from seamflow.cli.diagnosis import Finding, activity
from seamflow.cli.endpoints import Command, Endpoints, UsageError, add_flags, reached, resolve
from seamflow.cli.export_run.export import export
from seamflow.cli.export_run.replay import replay
from seamflow.cli.init_project.init_project import init_project
from seamflow.cli.json_output import plain
from seamflow.cli.run_commands import delete_run, end_run, runs
from seamflow.cli.run_folders import print_run_folders
from seamflow.cli.scheduling import plan_nodes, plan_split, pool, set_policy
from seamflow.cli.snapshot import Snapshot, gather
from seamflow.cli.status import ago, all_answered, status_screen
from seamflow.cli.tail import tail
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
from seamflow.user_code.user_modules import FOLDER_VARIABLE

__all__ = ["main"]

_OK, _USAGE, _UNAVAILABLE, _CONFIG = 0, 64, 69, 78  # sysexits.h


_MODULES = {
    "train": ("services.launcher",),
    "serve": ("services.launcher", "--serve"),
    "evaluate": ("services.launcher.evaluate_checkpoint",),
    "export-model": ("trainer.checkpoint.model_folder",),
}
"""Commands that are modules of the checkout, with their first arguments."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] and arguments[0] in _MODULES:
        module, *flags = _MODULES[arguments[0]]
        _launch(module, [*flags, *arguments[1:]])
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
    if arguments[:1] == ["init"]:
        return init_project(arguments[1:])
    given = _parser().parse_args(arguments)
    if given.command is runs and given.trajectory_manager is None:
        return print_run_folders(given.folder)
    run: Command = given.command
    return asyncio.run(_awaited(run(given, resolve(given))))


async def _awaited(code: Awaitable[int]) -> int:
    return await code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="seamflow", description="Inspect and operate a run.")
    parser.add_argument("--version", action="version", version=f"seamflow {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, run: Command, about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about)
        add_flags(added)
        added.set_defaults(command=run)
        return added

    status = command("status", _status, "The run on one screen.")
    why = command("why-stuck", _why_stuck, "What waits for what, since when, and the cure.")
    for reader in (status, why):
        reader.add_argument("--json", action="store_true", help="for programs")
    drain = command("drain", _drain, "Give a node no new work; its current work moves.")
    drain.add_argument("node")
    drain.add_argument("--undo", action="store_true", help="let it take work again")
    watch = command("tail", _tail, "Follow the turns of a rollout as they grow.")
    watch.add_argument("rollout")
    watch.add_argument("--model", type=Path, help="folder whose tokenizer turns ids into text")
    _add_transcripts(command)
    exporting = command("export", _export, "Write a run's samples to Parquet files.")
    exporting.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    exporting.add_argument(
        "--committed-only", action="store_true", help="only what a step committed"
    )
    exporting.add_argument(
        "--delete", action="store_true", help="then delete the rollouts the run no longer needs"
    )
    replaying = command("replay", _replay, "Feed an export to the trainer of another run.")
    replaying.add_argument("folder", type=Path, help="what `seamflow export` wrote")
    letters = command("dead-letters", _dead_letters, "Groups that left without being trained.")
    letters.add_argument(
        "--requeue", action="append", metavar="TASK", help="queue this task again; repeat"
    )
    command("columns", _columns, "Which columns the samples that wait for training have.")
    _add_run_commands(command)
    _add_pool_commands(command)
    _add_worker_commands(command)
    commands.add_parser("train", help="Train: the arguments of `python -m services.launcher`.")
    commands.add_parser("evaluate", help="Run tasks with a checkpoint; --help shows the arguments.")
    commands.add_parser("init", help="Write a commented project that trains within a minute.")
    commands.add_parser(
        "export-model", help="Write a checkpoint as a plain Hugging Face folder: CHECKPOINT OUT."
    )
    commands.add_parser("serve", help="Keep the processes for agents elsewhere, until Ctrl-C.")
    return parser


def _add_transcripts(command: Callable[[str, Command, str], argparse.ArgumentParser]) -> None:
    about = "Write the closed rollouts of a run with text and rewards, to JSON lines or Parquet."
    writing = command("transcripts", _transcripts, about)
    writing.add_argument("--out", type=Path, required=True, metavar="FILE", help=".parquet: so")
    writing.add_argument("--purpose", choices=("train", "eval"), help="only these rollouts")
    writing.add_argument("--newest", type=_positive, metavar="N", help="only the newest N")
    writing.add_argument(
        "--model", type=Path, help="folder whose tokenizer turns ids into text (the run folder's)"
    )


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _add_run_commands(command: Callable[[str, Command, str], argparse.ArgumentParser]) -> None:
    listing = command(
        "runs", runs, "The run folders here; with --trajectory-manager, the runs that it keeps."
    )
    listing.add_argument("--folder", type=Path, default=Path("runs"), help="of run folders (runs)")
    ending = command("end-run", end_run, "Give agents no more tasks of a run.")
    deleting = command("delete-run", delete_run, "Delete all that is stored of an ended run.")
    for named in (ending, deleting):
        named.add_argument("name", metavar="RUN")


def _add_pool_commands(command: Callable[[str, Command, str], argparse.ArgumentParser]) -> None:
    command("pool", pool, "The runs that share the pool of nodes.")
    policy = command("set-policy", set_policy, "Set priority and quota of a run in the pool.")
    policy.add_argument("--priority", type=int, default=0, help="higher gangs go first (0)")
    policy.add_argument("--max-nodes", type=int, default=0, help="quota; 0: none")
    policy.add_argument("--rollout-share", type=float, default=1.0, help="of free nodes (1)")
    nodes = command("plan-nodes", plan_nodes, "What a request for nodes would change.")
    nodes.add_argument("--gang", required=True, help="name of the gang")
    nodes.add_argument("--nodes", type=int, required=True, help="how many, all or none")
    nodes.add_argument("--tag", default="train", help="capability tag (train)")
    split = command("plan-split", plan_split, "How many nodes should generate and train.")
    for stage in ("generation", "training"):
        split.add_argument(f"--{stage}", required=True, metavar="NODES=SECONDS,…")
        split.add_argument(f"--{stage}-nodes", type=int, default=0, help="of its own datacentre")
    split.add_argument("--nodes", type=int, default=0, help="to split, in one datacentre")


def _add_worker_commands(command: Callable[[str, Command, str], argparse.ArgumentParser]) -> None:
    update = command("update-weights", update_weights, "Let a rollout server load weights now.")
    update.add_argument("server", metavar="HOST:PORT")
    update.add_argument("--version", type=int, help="a committed version; default: the newest")
    command("save-checkpoint", save_checkpoint, "Let the trainer write a checkpoint now.")


async def _status(given: argparse.Namespace, endpoints: Endpoints) -> int:
    if endpoints.ended and not given.json:
        print(endpoints.ended)
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
    decoder = _decoder(given.model) if given.model else token_numbers
    run_id = endpoints.run_id or await _trainers_run(endpoints)
    async with reached(endpoints, "trajectory_manager") as channel:
        async for text in tail(channel, run_id, given.rollout, decoder):
            print(text, end="", flush=True)
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


def _launch(module: str, arguments: list[str]) -> NoReturn:
    """Replace this process by a module that runs from a checkout, not from the wheel.

    The checkout is the current folder's, or the one that seamflow is installed from.
    """
    here = Path.cwd()
    places = (here, *here.parents, Path(__file__).parents[3])
    root = next((f for f in places if (f / "services" / "launcher").is_dir()), None)
    if root is None:
        sys.exit(
            _error(
                "the processes run from a checkout, not from the wheel: go to a folder of your "
                "clone of seamflow and run the command there",
                _CONFIG,
            )
        )
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",
        FOLDER_VARIABLE: os.environ.get(FOLDER_VARIABLE) or str(here),
    }
    sys.stdout.flush()
    os.execve(  # noqa: S606  # the module takes over this very process, signals included
        sys.executable, [sys.executable, "-m", module, *arguments], environment
    )


def _answered(snapshot: Snapshot) -> int:
    return _OK if all_answered(snapshot) else _UNAVAILABLE


def _code(error: SeamflowError) -> int:
    if isinstance(error, InvalidRequestError | NotFoundError):
        return _USAGE
    return _CONFIG if isinstance(error, PermissionDeniedError) else _UNAVAILABLE


def _error(message: str, code: int) -> int:
    sys.stderr.write(f"seamflow: {message}\n")
    return code


if __name__ == "__main__":
    main()
