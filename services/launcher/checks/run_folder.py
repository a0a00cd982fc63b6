"""The folder of a run stays where it is, and writable, while the run goes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from services.chassis.errors import DependencyUnavailable

_SECONDS = 1.0
_DELETED = " (deleted)"


async def watch_folder(folder: Path, seconds: float = _SECONDS) -> NoReturn:
    """Look at `folder` every `seconds`.

    Raises:
        DependencyUnavailable: it was moved, deleted or replaced, or cannot be written any more:
            what processes write would go astray, half here and half there.
    """
    with opened_folder(folder) as descriptor:
        while True:
            await asyncio.sleep(seconds)
            problem = await asyncio.to_thread(folder_problem, folder, descriptor)
            if problem:
                raise DependencyUnavailable("run folder", problem)


@contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """A descriptor of `folder`, which knows it by any later name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def folder_problem(folder: Path, descriptor: int) -> str:
    """What is wrong with the folder that was opened as `descriptor`; empty if it is usable."""
    if not _is_same(folder, descriptor):
        return f"{folder} {_whereabouts(descriptor)}, so that the run cannot go on"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        cure = "mount its file system for writing, then --resume"
        return f"{folder} is on a file system that became read-only: {cure}"
    if not os.access(folder, os.W_OK | os.X_OK):
        cure = "give this user its permissions back, then --resume"
        return f"{folder} cannot be written any more: {cure}"
    return ""


def _is_same(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _whereabouts(descriptor: int) -> str:
    """What became of the folder, as far as the system tells."""
    try:
        now = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return "is gone: put it back there, then --resume"
    if now.endswith(_DELETED):
        return "was deleted: put a copy there and --resume, or start a new run"
    return f"was moved to {now}: move it back, then --resume"
