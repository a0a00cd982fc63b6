"""The best checkpoint, kept while older checkpoints are deleted.

On a disk by hard links; in an object store, which has none, by its name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint import own_files
from trainer.object_path import Folder, ObjectPath

_CANDIDATE = "best.candidate_"


class BestCheckpoint:
    """checkpoints/best: what the trainer wrote for the best evaluated step.

    A candidate is linked before its evaluation, as it may be deleted meanwhile. Links need no space
    until then. A candidate is a complete folder, or absent: it outlives the process.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is the trainer's, whose checkpoints are named step_*."""
        self._folder = folder
        self.path = folder / own_files.BEST.removesuffix(".json")
        """The best checkpoint; a complete folder, or absent."""
        self._partial, self._replaced = folder / ".partial_best", folder / ".replaced_best"

    def recover(self, step: int) -> None:
        """Undo what a crash interrupted, and drop a candidate that is undone.

        Args:
            step: of the checkpoint that training resumes from; later ones are made again.
        """
        for old in (self._replaced, self._folder / "best.old"):  # of release 0.3
            if _facts(old) and not self.path.exists():
                old.rename(self.path)
        for leftover in (self._replaced, self._partial):
            own_files.clear(leftover)
        self._drop(lambda held: held > step)

    def hold(self, step: int) -> bool:
        """Link the checkpoint of `step` as the only candidate; False: there is none.

        One that was held before is replaced: the step may have been undone, and made again.
        """
        self._drop(lambda held: held != step)
        candidate = self._folder / own_files.folder_name(step, _CANDIDATE)
        if self._link(self._folder / own_files.folder_name(step), step):
            own_files.clear(candidate)
            self._partial.rename(candidate)
        return step in own_files.steps_in(self._folder, _CANDIDATE) and own_files.has_step(
            candidate, step
        )

    def _link(self, source: Path, step: int) -> bool:
        """Whether a complete checkpoint of a step, which is not deleted yet, is linked whole."""
        own_files.delete(self._partial)
        if source.is_symlink() or not own_files.has_step(source, step):
            return False
        self._partial.mkdir()
        try:
            for path in own_files.own_in(source):
                _link(path, self._partial / path.name)
        except OSError:  # just deleted
            own_files.delete(self._partial)
        if not own_files.is_complete(self._partial):
            own_files.delete(self._partial)
        return self._partial.exists()

    def keep(self, step: int, facts: Mapping[str, object]) -> Path:
        """Make the checkpoint of `step` the best one, with `facts` as best.json; its folder.

        Raises:
            FileNotFoundError: it was never written, was deleted before it was held, or is damaged.
        """
        facts = json.loads(json.dumps(facts))
        if not self.hold(step):
            if _facts(self.path) == facts:  # a repeated call
                return self.path
            raise FileNotFoundError(f"{self._folder} has no checkpoint of step {step}")
        candidate = self._folder / own_files.folder_name(step, _CANDIDATE)
        try:
            own_files.verify(candidate)
        except own_files.DamagedError as error:
            own_files.delete(candidate)
            raise FileNotFoundError(str(error)) from error
        (candidate / own_files.BEST).write_text(json.dumps(facts, indent=1) + "\n")
        if _facts(self.path):
            own_files.clear(self._replaced)
            self.path.rename(self._replaced)
        elif self.path.is_symlink() or self.path.exists():
            own_files.move_aside(self.path, own_files.OTHER)
        candidate.rename(self.path)
        own_files.clear(self._replaced)
        return self.path

    def _drop(self, undone: Callable[[int], bool]) -> None:
        for step, candidate in own_files.steps_in(self._folder, _CANDIDATE).items():
            if undone(step) and own_files.has_step(candidate, step):
                own_files.delete(candidate)


class BestObject:
    """best.json, beside the checkpoints of an object store, names the best evaluated step.

    best_candidate.json names the one that is being evaluated. `checkpoint_files.complete` deletes
    neither's checkpoint.
    """

    def __init__(self, folder: ObjectPath) -> None:
        """`folder` is the trainer's, whose checkpoints are named step_*."""
        self._folder = folder

    def recover(self, step: int) -> None:
        """Forget the names of checkpoints after `step`, which are damaged and made again."""
        for name in (own_files.BEST, own_files.CANDIDATE):
            if (own_files.named_step(self._folder / name) or 0) > step:
                (self._folder / name).unlink()

    def hold(self, step: int) -> bool:
        """Name the checkpoint of `step` as the only candidate; False: there is none."""
        candidate, held = (
            self._folder / own_files.CANDIDATE,
            self._folder / own_files.folder_name(step),
        )
        candidate.write_text(json.dumps({"step": step}))  # first: it may just be deleted
        if own_files.is_complete(held) and own_files.has_step(held, step):
            return True
        candidate.unlink()
        return False

    def keep(self, step: int, facts: Mapping[str, object]) -> ObjectPath:
        """Make the checkpoint of `step` the best one, with `facts` in best.json; its folder.

        Raises:
            FileNotFoundError: it was never written, or was deleted before it was held.
        """
        if not self.hold(step):
            raise FileNotFoundError(f"{self._folder} has no checkpoint of step {step}")
        (self._folder / own_files.BEST).write_text(json.dumps({**facts, "step": step}, indent=1))
        (self._folder / own_files.CANDIDATE).unlink()
        return self._folder / own_files.folder_name(step)


def best_of(folder: Folder) -> BestCheckpoint | BestObject:
    """The best checkpoint of those in `folder`."""
    return BestObject(folder) if isinstance(folder, ObjectPath) else BestCheckpoint(folder)


def _facts(folder: Path) -> Any:
    """What the trainer wrote of a best checkpoint; None: the folder is none."""
    if (
        folder.is_symlink()
        or not own_files.is_complete(folder)
        or own_files.named_step(folder / own_files.BEST) is None
    ):
        return None
    return json.loads((folder / own_files.BEST).read_bytes())


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
