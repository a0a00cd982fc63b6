"""What a backup holds: files with their SHA-256, and how they belong together.

backup.json                              written last: without it a folder is no backup
redis.rdb                                the snapshot
checkpoints/<run>/step_000000012/...     as the trainer wrote it
weights/<run>/policy/weight_v000012/...  newest committed version
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from services.chassis.errors import ConfigError

MANIFEST = "backup.json"
RDB = "redis.rdb"
FORMAT = 2


class BackupError(ConfigError):
    """A backup that cannot be made or used; the message names the file or setting, and the cure."""


@dataclass(slots=True, kw_only=True)
class Contents:
    """`backup.json`."""

    release: str
    """Of seamflow, which made the backup."""
    time: float
    """Unix seconds of the snapshot."""
    database: int
    num_keys: int
    runs: dict[str, dict[str, int]] = field(default_factory=dict)
    """By run: committed_step, leased_step, checkpoint_step and weight_version; 0 for none."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 by path in the backup."""

    def write(self, folder: Path) -> None:
        """Write it durably, as the last file."""
        file = folder / MANIFEST
        file.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1))
        _sync(file)
        _sync(folder)


def read_contents(folder: Path) -> Contents:
    """What is in the backup, after each file was checked.

    Raises:
        BackupError: it is not a backup, or names the file that is missing or changed.
    """
    try:
        record = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        message = f"{folder} is not a whole backup: {MANIFEST} cannot be read: {error}"
        raise BackupError(message) from error
    if record.pop("format") != FORMAT:
        raise BackupError(f"{folder} was written by another release: restore it with that release")
    contents = Contents(**record)
    for path, digest in contents.files.items():
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise BackupError(f"{folder / MANIFEST} names {path!r}, outside the backup")
        if not (folder / path).is_file():
            raise BackupError(f"{folder / path} is missing: use another backup")
        if sha256_of(folder / path) != digest:
            raise BackupError(
                f"{folder / path} differs from its checksum, so it is damaged: use another backup"
            )
    return contents


def copied(source: Path, target: Path) -> None:
    """Copy a file durably; `target` exists only when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.copying")
    shutil.copyfile(source, partial)
    _sync(partial)
    partial.replace(target)
    _sync(target.parent)


def sha256_of(path: Path) -> str:
    """In hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
