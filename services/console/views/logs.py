"""The logs of a run's processes, as its folder has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from services.console.api_error import ApiError

_LAST_BYTES = 1 << 18


def logs(folder: Path | None) -> list[dict[str, Any]]:
    """Name, size in bytes and time of the last line of each; none without a folder."""
    files = ((file, file.stat()) for file in _files(folder))
    return [{"name": f.stem, "bytes": s.st_size, "time": s.st_mtime} for f, s in files]


def last_lines(folder: Path | None, name: str) -> str:
    """The end of a log, at most 256 KiB of whole lines.

    Raises:
        ApiError: the run has no log of that name.
    """
    found = next((file for file in _files(folder) if file.stem == name), None)
    if found is None:
        raise ApiError(404, f"the run has no log {name[:200]!r}", "see its overview for those")
    with found.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _LAST_BYTES, 0))
        text = file.read()
    return (text.partition(b"\n")[2] if size > _LAST_BYTES else text).decode(errors="replace")


def _files(folder: Path | None) -> list[Path]:
    """Those of the run itself: a link may lead anywhere."""
    found = [] if folder is None else sorted((folder / "logs").glob("*.log"))
    return [file for file in found if file.is_file() and not file.is_symlink()]
