"""The best checkpoint, kept by hard links while the trainer deletes older ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["BestCheckpoint"]

_COMPLETE = ".complete"


class BestCheckpoint:
    """checkpoints/best: what the trainer wrote for the best evaluated step.

    A candidate is linked before its evaluation, as the trainer may delete it meanwhile. Links need
    no space until then.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is the trainer's, whose checkpoints are named step_*."""
        self._folder = folder
        self.path = folder / "best"
        """The best checkpoint; a complete folder, or absent."""
        self._candidate = folder / "best.candidate"

    def recover(self) -> None:
        """Undo what a crash interrupted."""
        old = self._folder / "best.old"
        if old.is_dir() and not self.path.is_dir():
            old.rename(self.path)
        shutil.rmtree(old, ignore_errors=True)
        self.drop()

    def hold(self, step: int) -> bool:
        """Link the checkpoint of `step` as the candidate; False: there is none."""
        self.drop()
        source = self._folder / f"step_{step:09d}"
        try:
            shutil.copytree(source, self._candidate, copy_function=_link)
        except (OSError, shutil.Error):  # never written, or just deleted
            self.drop()
            return False
        if not (self._candidate / _COMPLETE).is_file():
            self.drop()
            return False
        return True

    def keep(self, facts: Mapping[str, object]) -> Path:
        """Make the candidate the best checkpoint, with `facts` as best.json; returns its folder."""
        (self._candidate / "best.json").write_text(json.dumps(facts, indent=1) + "\n")
        old = self._folder / "best.old"
        shutil.rmtree(old, ignore_errors=True)
        with suppress(FileNotFoundError):
            self.path.rename(old)
        self._candidate.rename(self.path)
        shutil.rmtree(old, ignore_errors=True)
        return self.path

    def drop(self) -> None:
        """Forget the candidate."""
        shutil.rmtree(self._candidate, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
