"""One process at a time writes to the folder of a run."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from services.chassis.errors import ConfigError

LOCK_FILE = "run.lock"


def hold(folder: Path) -> None:
    """Hold `folder` until this process ends; the kernel lets go of it, however it ends.

    The file stays and says who holds it; children do not.

    Raises:
        ConfigError: another process holds it, which is named, or it cannot be written.
    """
    file = folder / LOCK_FILE
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"folder {str(folder)!r} cannot be locked: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise ConfigError(f"{str(file)!r} cannot be locked: {error}") from error
        raise ConfigError(
            f"folder {str(folder)!r} is in use by {_holder(file)}: end that process, or wait for it"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def _holder(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() or "another process"
