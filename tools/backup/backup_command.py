"""`seamflow backup save` and `seamflow backup restore`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from services.chassis.errors import StartupError, UsageError
from tools.backup.contents import Contents
from tools.backup.restore import restore
from tools.backup.save import save


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a failure is one line and its exit code."""
    try:
        given = _parser().parse_args(arguments)
        url, checkpoints = _url(given), dict(given.checkpoints)
        if given.command == "save":
            contents = asyncio.run(save(url, given.out, checkpoints, given.weights))
        else:
            contents = asyncio.run(restore(given.backup, url, checkpoints, given.weights))
        _report(contents)
    except StartupError as error:
        print(f"backup: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _report(contents: Contents) -> None:
    print(f"{contents.num_keys} keys, {len(contents.files)} files")
    for run_id, numbers in contents.runs.items():
        print(f"  {run_id}: " + ", ".join(f"{name} {value}" for name, value in numbers.items()))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="seamflow backup", description="Back up and restore runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("save", help="make a backup while the services run")
    make.add_argument("--out", type=Path, required=True, help="new folder of the backup")
    back = commands.add_parser("restore", help="restore one into an empty Redis")
    back.add_argument("--backup", type=Path, required=True, help="folder of the backup")
    for command in (make, back):
        command.add_argument("--redis-url", help="else the variable REDIS_URL, which hides it")
        command.add_argument("--weights", type=Path, help="folder of the weights service")
        command.add_argument(
            "--checkpoints",
            type=_run_folder,
            action="append",
            default=[],
            metavar="RUN=FOLDER",
            help="checkpoint.folder of the trainer of a run; repeat",
        )
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _run_folder(text: str) -> tuple[str, Path]:
    run_id, sign, folder = text.partition("=")
    if not (run_id and sign and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not RUN=FOLDER")
    return run_id, Path(folder)


def _url(given: argparse.Namespace) -> str:
    url: str | None = given.redis_url or os.environ.get("REDIS_URL")
    if not url:
        raise UsageError("give --redis-url, or set REDIS_URL")
    return url
