"""Verbs and flags of the `seamflow` command."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from seamflow import __version__
from seamflow.cli.endpoints import Command, add_flags

__all__ = ["make_parser"]

_USAGE = 64  # sysexits.h

Add = Callable[[str, str], argparse.ArgumentParser]
"""Adds the verb of a name, with one line about it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(_USAGE, f"{self.prog}: {message}\n")

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """As its base class, but what is unknown names the nearest that is known."""
        verbs = self._verbs()
        if verbs and args and not args[0].startswith("-") and args[0] not in verbs:
            self.error(f"there is no command {args[0]!r}{_nearest(args[0], verbs)}")
        given, unknown = self.parse_known_args(args)
        if unknown:
            options = self._options(args)
            self.error(f"unknown argument {unknown[0]}{_nearest(unknown[0], options)}")
        return given

    def _verbs(self) -> Mapping[str, argparse.ArgumentParser]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices
        return {}

    def _options(self, args: Sequence[str]) -> Iterable[str]:
        verb = next((each for each in args if each in self._verbs()), None)
        parser = self if verb is None else self._verbs()[verb]
        return [option for action in parser._actions for option in action.option_strings]


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "; see --help"


def make_parser(run: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The parser, which puts `run` of the given verb into the namespace, as `command`."""
    parser = _Parser(
        prog="seamflow",
        description="Train agents, look at a run, operate it.",
        epilog="seamflow COMMAND --help lists the arguments of a command.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=20, width=100),
    )
    parser.add_argument("--version", action="version", version=f"seamflow {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=_Parser)
    _add_modules(commands)

    def command(name: str, about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        add_flags(added)
        added.set_defaults(command=run[name])
        return added

    status = command("status", "The run on one screen.")
    why = command("why-stuck", "What waits for what, since when, and the cure.")
    for reader in (status, why):
        reader.add_argument("--json", action="store_true", help="write JSON, with every field")
    drain = command("drain", "Give a node no new work; its current work moves.")
    drain.add_argument("node")
    drain.add_argument("--undo", action="store_true", help="let it take work again")
    watch = command("tail", "Follow the turns of a rollout as they grow.")
    watch.add_argument("rollout", nargs="?", help="its id; none: list those of the run")
    watch.add_argument("--model", type=Path, help="folder whose tokenizer turns ids into text")
    _add_transcripts(command)
    exporting = command("export", "Write a run's samples to Parquet files.")
    exporting.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    exporting.add_argument(
        "--committed-only", action="store_true", help="only what a step committed"
    )
    exporting.add_argument(
        "--delete", action="store_true", help="then delete the rollouts the run no longer needs"
    )
    replaying = command("replay", "Feed an export to the trainer of another run.")
    replaying.add_argument("folder", type=Path, help="what `seamflow export` wrote")
    letters = command("dead-letters", "Groups that left without being trained.")
    letters.add_argument(
        "--requeue", action="append", metavar="TASK", help="queue this task again; repeat"
    )
    command("columns", "Which columns the samples that wait for training have.")
    _add_run_commands(command)
    _add_pool_commands(command)
    _add_worker_commands(command)
    return parser


def _add_modules(commands: argparse._SubParsersAction[_Parser]) -> None:
    """The verbs that come first in the life of a run; but for init, modules take them over."""
    making = "Write a commented project that learns within minutes."
    init = commands.add_parser("init", help=making, description=making)
    init.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    for name, about in {
        "train": "Train by a configuration file.",
        "serve": "Keep the processes for agents elsewhere, until Ctrl-C.",
        "evaluate": "Run tasks with a checkpoint, without training.",
        "export-model": "Write a checkpoint as a plain Hugging Face folder.",
        "backup": "Save runs while they go on, or restore them.",
        "planning": "Plan splits and placements of nodes from measured costs.",
    }.items():
        commands.add_parser(name, help=about, add_help=False)


def _add_transcripts(command: Add) -> None:
    about = "Write the closed rollouts of a run with text and rewards, to JSON lines or Parquet."
    writing = command("transcripts", about)
    form = "new file: Parquet if its name ends with .parquet, else JSON lines"
    writing.add_argument("--out", type=Path, required=True, metavar="FILE", help=form)
    writing.add_argument("--purpose", choices=("train", "eval"), help="only these rollouts")
    writing.add_argument("--newest", type=_positive, metavar="N", help="only the newest N")
    writing.add_argument(
        "--model", type=Path, help="folder whose tokenizer turns ids into text (the run folder's)"
    )


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _add_run_commands(command: Add) -> None:
    listing = command(
        "runs", "The run folders here; with --trajectory-manager, the runs that it keeps."
    )
    listing.add_argument("--folder", type=Path, default=Path("runs"), help="of run folders (runs)")
    ending = command("end-run", "Give agents no more tasks of a run.")
    deleting = command("delete-run", "Delete all that is stored of an ended run.")
    for named in (ending, deleting):
        named.add_argument("name", metavar="RUN")


def _add_pool_commands(command: Add) -> None:
    command("pool", "The runs that share the pool of nodes.")
    policy = command("set-policy", "Set priority and quota of a run in the pool.")
    policy.add_argument("--priority", type=int, default=0, help="higher gangs go first (0)")
    policy.add_argument("--max-nodes", type=int, default=0, help="quota; 0 for none")
    policy.add_argument("--rollout-share", type=float, default=1.0, help="of free nodes (1)")
    nodes = command("plan-nodes", "What a request for nodes would change.")
    nodes.add_argument("--gang", required=True, help="name of the gang")
    nodes.add_argument("--nodes", type=int, required=True, help="how many, all or none")
    nodes.add_argument("--tag", default="train", help="capability tag (train)")
    split = command("plan-split", "How many nodes should generate and train.")
    for stage in ("generation", "training"):
        split.add_argument(f"--{stage}", required=True, metavar="NODES=SECONDS,…")
        split.add_argument(f"--{stage}-nodes", type=int, default=0, help="of its own datacentre")
    split.add_argument("--nodes", type=int, default=0, help="to split, in one datacentre")


def _add_worker_commands(command: Add) -> None:
    update = command("update-weights", "Let a rollout server load weights now.")
    update.add_argument("server", metavar="HOST:PORT")
    update.add_argument("--version", type=int, help="a committed version; default: the newest")
    command("save-checkpoint", "Let the trainer write a checkpoint now.")
