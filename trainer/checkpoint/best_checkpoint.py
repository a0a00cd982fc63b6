"""The best checkpoint, kept while older checkpoints are deleted.

On a disk by hard links; in an object store, which has none, by its name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint.checkpoint_files import folder_name, is_complete
from trainer.fsync_files import COMPLETE
from trainer.object_path import Folder, ObjectPath

__all__ = ["BestCheckpoint", "BestObject", "best_of"]


class BestCheckpoint:
    """checkpoints/best: what the trainer wrote for the best evaluated step.

    A candidate is linked before its evaluation, as it may be deleted meanwhile. Links need no space
    until then. A candidate is a complete folder, or absent: it outlives the process.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is the trainer's, whose checkpoints are named step_*."""
        self._folder = folder
        self.path = folder / "best"
        """The best checkpoint; a complete folder, or absent."""

    def recover(self) -> None:
        """Undo what a crash interrupted."""
        old = self._folder / "best.old"
        if old.is_dir() and not self.path.is_dir():
            old.rename(self.path)
        for leftover in (old, self._partial):
            shutil.rmtree(leftover, ignore_errors=True)

    def hold(self, step: int) -> bool:
        """Link the checkpoint of `step` as the only candidate; False: there is none."""
        self._drop_others(step)
        if self._candidate(step).is_dir():
            return True
        shutil.rmtree(self._partial, ignore_errors=True)
        source = self._folder / folder_name(step)
        try:
            shutil.copytree(source, self._partial, copy_function=_link)
        except (OSError, shutil.Error):  # never written, or just deleted
            shutil.rmtree(self._partial, ignore_errors=True)
            return False
        if not (self._partial / COMPLETE).is_file():
            shutil.rmtree(self._partial)
            return False
        self._partial.rename(self._candidate(step))
        return True

    def keep(self, step: int, facts: Mapping[str, object]) -> Path:
        """Make the checkpoint of `step` the best one, with `facts` as best.json; its folder.

        Raises:
            FileNotFoundError: it was never written, or was deleted before it was held.
        """
        if not self.hold(step):
            if self._is_best(step):
                return self.path
            raise FileNotFoundError(f"{self._folder} has no checkpoint of step {step}")
        candidate, old = self._candidate(step), self._folder / "best.old"
        (candidate / "best.json").write_text(json.dumps(facts, indent=1) + "\n")
        shutil.rmtree(old, ignore_errors=True)
        with suppress(FileNotFoundError):
            self.path.rename(old)
        candidate.rename(self.path)
        shutil.rmtree(old, ignore_errors=True)
        return self.path

    @property
    def _partial(self) -> Path:
        return self._folder / "best.partial"

    def _candidate(self, step: int) -> Path:
        return self._folder / f"best.candidate_{step:09d}"

    def _drop_others(self, step: int) -> None:
        for candidate in self._folder.glob("best.candidate_*"):
            if candidate != self._candidate(step):
                shutil.rmtree(candidate, ignore_errors=True)

    def _is_best(self, step: int) -> bool:
        """Whether a repeated call names the step that is the best one already."""
        try:
            facts = json.loads((self.path / "best.json").read_text())
        except (OSError, ValueError):
            return False
        return bool(facts.get("step") == step)


class BestObject:
    """best.json, beside the checkpoints of an object store, names the best evaluated step.

    best_candidate.json names the one that is being evaluated. `checkpoint_files.complete` deletes
    neither's checkpoint.
    """

    def __init__(self, folder: ObjectPath) -> None:
        """`folder` is the trainer's, whose checkpoints are named step_*."""
        self._folder = folder
        self._candidate = folder / "best_candidate.json"

    def recover(self) -> None:
        """Nothing is left half done."""

    def hold(self, step: int) -> bool:
        """Name the checkpoint of `step` as the only candidate; False: there is none."""
        self._candidate.write_text(json.dumps({"step": step}))  # first: it may just be deleted
        held = is_complete(self._folder / folder_name(step))
        if not held:
            self._candidate.unlink()
        return held

    def keep(self, step: int, facts: Mapping[str, object]) -> ObjectPath:
        """Make the checkpoint of `step` the best one, with `facts` in best.json; its folder.

        Raises:
            FileNotFoundError: it was never written, or was deleted before it was held.
        """
        if not self.hold(step):
            raise FileNotFoundError(f"{self._folder} has no checkpoint of step {step}")
        (self._folder / "best.json").write_text(json.dumps({**facts, "step": step}, indent=1))
        self._candidate.unlink()
        return self._folder / folder_name(step)


def best_of(folder: Folder) -> BestCheckpoint | BestObject:
    """The best checkpoint of those in `folder`."""
    return BestObject(folder) if isinstance(folder, ObjectPath) else BestCheckpoint(folder)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
