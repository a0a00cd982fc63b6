"""What a trainer wrote itself among all that lies beside its checkpoints, and nothing else.

People keep copies, notes and links there. A checkpoint is ours by its exact name and by the step
that its state.json names; a file in it by its exact name. Nothing else is counted, read or deleted.

checksums.json   SHA-256 of each other file, by name
.complete        SHA-256 of checksums.json, written last
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from services.chassis.log import get_logger
from trainer import fsync_files
from trainer.object_path import AnyFolder, Folder, listed

CHECKPOINT = "step_"
"""What the names of checkpoints begin with."""
OTHER = "other_"
"""What the new name of somebody's folder begins with that had the name of one of ours."""
BEST, CANDIDATE = "best.json", "best_candidate.json"
"""Files that name the best evaluated step, and in an object store the one that is evaluated."""
STATE = "state.json"
"""File that names the step of a checkpoint, from its beginning on."""
_SHARD = re.compile(r"rank_[0-9]{5}_of_[0-9]{5}\.safetensors")
_FILE = re.compile(
    rf"{_SHARD.pattern}(\.sha256)?|rank_[0-9]{{5}}_of_[0-9]{{5}}\.partial|\.complete|\.damaged"
    r"|(state|checksums|best)\.json"
)


def folder_name(step: int, prefix: str = CHECKPOINT) -> str:
    return f"{prefix}{step:09d}"


def steps_in(folder: AnyFolder, prefix: str = CHECKPOINT) -> dict[int, AnyFolder]:
    """By step, what has exactly the name of a checkpoint of it, and is no link; in order.

    Whether it is one, `has_step` says.
    """
    found = {}
    for path in listed(folder, f"{prefix}*"):
        number = path.name.removeprefix(prefix)
        exact = re.fullmatch("[0-9]+", number) and folder_name(int(number), prefix) == path.name
        if exact and not (isinstance(path, Path) and (path.is_symlink() or not path.is_dir())):
            found[int(number)] = path
    return found


def mark_of(folder: Folder) -> Mapping[str, Any]:
    """What state.json says in a folder; empty if nobody can read it."""
    try:
        found = json.loads((folder / STATE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def has_step(folder: Folder, step: int, run_id: str | None = None) -> bool:
    """Whether a trainer wrote into `folder` that it is of this step, and of this run if given."""
    mark = mark_of(folder)
    return mark.get("step") == step and run_id in (None, mark.get("run_id"))


def named_step(file: Folder) -> int | None:
    """The step that best.json or best_candidate.json names; None: it names none."""
    try:
        found = json.loads(file.read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None


def is_complete(folder: Folder) -> bool:
    """Whether a checkpoint is there, whole."""
    return (folder / fsync_files.COMPLETE).is_file()


def shards_in(folder: AnyFolder) -> list[AnyFolder]:
    return [path for path in listed(folder, "rank_*") if _SHARD.fullmatch(path.name)]


def own_in(folder: AnyFolder) -> list[AnyFolder]:
    """The files in a checkpoint that a trainer writes there."""
    return [path for path in listed(folder) if _FILE.fullmatch(path.name)]


def delete(folder: Folder) -> None:
    """Delete a checkpoint's own files, its marker first, and the folder if nothing else is in it.

    An interrupted deletion leaves what is no checkpoint, and is deleted later by its state.json.
    """
    for path in sorted(
        own_in(folder), key=lambda path: (path.name != fsync_files.COMPLETE, path.name)
    ):
        path.unlink()
    if isinstance(folder, Path):
        with suppress(OSError):  # somebody's files are in it
            folder.rmdir()


def clear(folder: Path) -> None:
    """Free the name of a folder on a disk: what is ours in it is deleted, the rest renamed."""
    if not folder.is_symlink():
        delete(folder)
    if folder.is_symlink() or folder.exists():
        move_aside(folder, OTHER)


def move_aside(folder: AnyFolder, prefix: str) -> AnyFolder:
    """Give a folder, a link or a file of a disk a free name that begins with `prefix`; the path."""
    assert isinstance(folder, Path)
    kept, number = folder.with_name(f"{prefix}{folder.name}"), 0
    while kept.exists() or kept.is_symlink():
        number += 1
        kept = folder.with_name(f"{prefix}{folder.name}.{number}")
    folder.rename(kept)
    fsync_files.sync(kept.parent)
    get_logger().warning("moved_aside", folder=str(folder), kept=str(kept))
    return cast("AnyFolder", kept)


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
