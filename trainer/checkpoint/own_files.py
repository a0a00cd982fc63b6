"""What a trainer wrote itself among all that lies beside its checkpoints, and nothing else.

People keep copies, notes and links there. A checkpoint is ours by its exact name and by the step
that its state.json names; a file in it by its exact name. Nothing else is counted, read or deleted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

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
    """The name of the checkpoint of a step."""
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
    """The files of the ranks in a checkpoint."""
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
