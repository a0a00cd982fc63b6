"""`seamflow backup save` and `seamflow backup restore`."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from redis.asyncio import Redis

from services.chassis.config.load import exiting
from services.chassis.errors import UsageError
from services.chassis.redis.connect import connect
from services.launcher.same_run import hold
from tools.backup.save import save
from tools.backup.snapshot import (
    RDB,
    BackupError,
    Contents,
    copied,
    read_contents,
    require_one_server,
    serving,
)

_KEYS = 256
_COMPLETE = ".complete"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a failure is one line and its exit code."""
    with exiting("backup"):
        given = _parser().parse_args(arguments)
        url, checkpoints = _url(given), dict(given.checkpoints)
        if given.command == "save":
            contents = asyncio.run(save(url, given.out, checkpoints, given.weights))
        else:
            contents = asyncio.run(restore(given.backup, url, checkpoints, given.weights))
        _report(contents)


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


async def restore(
    backup: Path, url: str, checkpoints: Mapping[str, Path], weights: Path | None
) -> Contents:
    """Restore everything; stop the services first and start them afterwards.

    Args:
        backup: folder that `save` made.
        url: Redis, empty.
        checkpoints: `checkpoint.folder` of the trainer, by run; without checkpoints.
        weights: `folder` of the weights service.

    Raises:
        BackupError: a file is damaged, or something is there already; nothing was written.
        ConfigError: a folder is in use by a run or by another restore.
    """
    require_one_server(url)
    contents = await asyncio.to_thread(read_contents, backup)
    targets = _targets(contents, checkpoints, weights)
    _hold([*checkpoints.values(), *([weights] if weights else ())])
    _check_free(targets.values())
    client = connect(url)
    try:
        if number := await client.dbsize():
            raise BackupError(f"redis_url has {number} keys: restore into an empty Redis")
        # The marker of a whole checkpoint comes last.
        for path in sorted(targets, key=lambda path: path.endswith(_COMPLETE)):
            await asyncio.to_thread(copied, backup / path, targets[path])
        async with serving(backup / RDB, contents.database) as source:
            await _copy_keys(source, client)
        if (number := await client.dbsize()) != contents.num_keys:
            raise BackupError(f"redis_url has {number} keys, the backup {contents.num_keys}")
    finally:
        await client.aclose()
    return contents


def _targets(
    contents: Contents, checkpoints: Mapping[str, Path], weights: Path | None
) -> dict[str, Path]:
    """Where each file of the backup belongs."""
    found: dict[str, Path] = {}
    for path in contents.files:
        kind, _, rest = path.partition("/")
        if kind == "weights":
            if weights is None:
                raise BackupError("the backup holds weights: give --weights FOLDER")
            found[path] = weights / rest
        elif kind == "checkpoints":
            run_id, _, name = rest.partition("/")
            if run_id not in checkpoints:
                raise BackupError(f"it holds a checkpoint: give --checkpoints {run_id}=FOLDER")
            found[path] = checkpoints[run_id] / name
    return found


def _hold(folders: Iterable[Path]) -> None:
    """Hold the folder that each is in: the run's, if it is the launcher's."""
    for parent in sorted({folder.resolve().parent for folder in folders}):
        parent.mkdir(parents=True, exist_ok=True)
        hold(parent)


def _check_free(targets: Iterable[Path]) -> None:
    for target in targets:
        if target.exists():
            raise BackupError(f"{target} exists: move it away, or name another folder")


async def _copy_keys(source: Any, target: Redis) -> None:
    keys = list(dict.fromkeys([key async for key in source.scan_iter(count=_KEYS)]))
    for first in range(0, len(keys), _KEYS):
        some = keys[first : first + _KEYS]
        read = source.pipeline(transaction=False)
        for key in some:
            read.dump(key)
            read.pexpiretime(key)
        values = await read.execute()
        write = target.pipeline(transaction=False)
        for key, dump, expires in zip(some, values[::2], values[1::2], strict=True):
            if dump is not None:  # else it has expired
                write.restore(key, max(expires, 0), dump, absttl=expires > 0)
        await write.execute()
