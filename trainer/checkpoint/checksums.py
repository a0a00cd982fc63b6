"""Checksums of a checkpoint's files, written with it and verified before anything is used.

checksums.json   SHA-256 of each other file, by name
.complete        SHA-256 of checksums.json, written last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from safetensors import SafetensorError, safe_open

from services.chassis.log import get_logger
from trainer import fsync_files
from trainer.checkpoint.own_files import own_in
from trainer.object_path import Folder

_CHECKSUMS = "checksums.json"
_NOTE = ".sha256"
_THREADS = 4


class DamagedError(ValueError):
    """A file of a checkpoint is not what was written."""

    def __init__(self, path: Folder, what: str) -> None:
        super().__init__(f"checkpoint file {path} {what}")


def note_digest(path: Folder, name: str, digest: str | None = None) -> None:
    """Write the checksum of `path`, which will be called `name`, durably beside it.

    `digest` is the checksum, if it is known.
    """
    fsync_files.write_json(path.with_name(name + _NOTE), digest or _digest(path))


def seal(folder: Folder) -> None:
    """Write the checksums of its own files, then the marker of a complete folder; durable.

    Files keep the checksum that was noted when they were written.
    """
    notes = [path for path in own_in(folder) if path.name.endswith(_NOTE)]
    digests = {note.stem: json.loads(note.read_text()) for note in notes}
    for note in notes:
        note.unlink()
    for path in own_in(folder):
        if path.name not in digests:
            digests[path.name] = _digest(path)
    fsync_files.write_json(folder / _CHECKSUMS, digests)
    fsync_files.write_marker(folder, _digest(folder / _CHECKSUMS))


def verify(folder: Folder) -> None:
    """Check all files of a complete checkpoint.

    One that release 0.2 wrote has no checksums: a warning is logged, and truncated files are found.

    Raises:
        DamagedError: names the first file that differs, is missing, or cannot be read.
    """
    marker = (folder / fsync_files.COMPLETE).read_bytes()
    if not marker and not (folder / _CHECKSUMS).exists():
        get_logger().warning("checkpoint_without_checksums", folder=str(folder))
        _verify_forms(folder)
    elif marker.decode(errors="replace") != _digest(folder / _CHECKSUMS):
        raise DamagedError(
            folder / _CHECKSUMS, f"differs from the checksum in {fsync_files.COMPLETE}"
        )
    else:
        _verify_digests(folder, read_json(folder / _CHECKSUMS))


def _verify_digests(folder: Folder, digests: Mapping[str, str]) -> None:
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(_digest, [folder / name for name in digests])
        for (name, expected), digest in zip(digests.items(), found, strict=True):
            if digest != expected:
                raise DamagedError(folder / name, "differs from its checksum: it is damaged")


def _verify_forms(folder: Folder) -> None:
    read_json(folder / "state.json")
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(str(path), framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise DamagedError(path, f"cannot be read: {error}") from error


def read_json(path: Folder) -> Mapping[str, Any]:
    """The content of a JSON file. Raises `DamagedError`."""
    try:
        found: Mapping[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedError(path, f"cannot be read: {error}") from error
    return found


def _digest(path: Folder) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise DamagedError(path, "is missing") from error
