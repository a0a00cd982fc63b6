"""Files on their way from a trainer, until a commit takes them into their version's folder.

`<root>/<run>/<model>/uploads/<name>.<sha256>` holds the checked bytes of one file from its start.
Its name is its content: two writers of it write the same bytes, and the trainer's next process
continues it under another version. It only grows, so a killed process leaves a shorter one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from seamflow.weights.v1.weight_service_pb2 import WeightFile

from services.chassis.errors import Reason, failed_precondition
from services.weights.checked_files import CheckedFiles

_FOLDER = "uploads"


class Uploads:
    """The uploaded files of one model of a run; all methods block, and raise `OSError`."""

    def __init__(self, folder: Path, checked: CheckedFiles) -> None:
        """`folder` is the model's; it is created by the first write. `checked` hashes the bytes."""
        self._folder = folder / _FOLDER
        self._checked = checked

    def path(self, file: WeightFile) -> Path:
        """Where the bytes of `file` are, if there are any."""
        return self._folder / f"{file.name}.{file.sha256}"

    def held(self, file: WeightFile) -> int | None:
        """Number of bytes of `file`; None: not even an empty file."""
        try:
            return self.path(file).stat().st_size
        except FileNotFoundError:
            return None

    def write(self, file: WeightFile, offset: int, data: bytes) -> int:
        """Append what is new of `data` at `offset`; returns the number of bytes held then.

        Raises:
            ServiceError: FAILED_PRECONDITION (OFFSET_GAP): bytes before `offset` are missing.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path(file), flags, 0o644)
        try:
            # Or two writers could hash one's bytes and store the other's.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held = os.fstat(descriptor).st_size
            if offset > held:
                raise _gap(file, offset, held)
            new = memoryview(data)[held - offset :]
            _write(descriptor, held, new)
            self._checked.received(self.path(file), descriptor, held, new)
            return held + len(new)
        finally:
            os.close(descriptor)

    def drop(self, file: WeightFile) -> None:
        """Delete the bytes of `file`."""
        self.path(file).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all files. A writer of one of them is told to begin again."""
        if self._folder.exists():
            shutil.rmtree(self._folder)


def _write(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        offset, data = offset + written, data[written:]


def _gap(file: WeightFile, offset: int, held: int) -> Exception:
    message = (
        f"file {file.name!r}: the part at byte {offset} follows {held} bytes; "
        "ask GetUpload and continue there"
    )
    return failed_precondition(Reason.OFFSET_GAP, message)
