"""Where an exception was raised in the user's own code."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

__all__ = ["user_place"]

_LIBRARIES = (
    Path(__file__).parent,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
)


def user_place(error: BaseException) -> str:
    """ " at file:line" of the innermost call that is the user's own; "" if none is."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    if not own:
        return ""
    path, line = Path(own[-1].filename), own[-1].lineno
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f" at {shown}:{line}"


def _is_library(file: str) -> bool:
    """Whether a file is of seamflow, of Python, or installed."""
    path = Path(file)
    return any(path.is_relative_to(folder) for folder in _LIBRARIES) or file.startswith("<")
