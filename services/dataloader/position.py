"""How far the dataloader is, on disk: written only after the tasks were acknowledged.

But what was decided for a task is written before it is sent: were it decided anew after a crash,
the same task would be submitted with two sizes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from services.chassis.errors import ConfigError

__all__ = ["Position", "PositionFile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The next task to submit, and what the numbers refer to."""

    source: str
    """Fingerprint of source, order, run and purpose: another one makes the numbers meaningless."""
    epoch: int = 0
    """Pass over the source, from 0."""
    place: int = 0
    """Place in the order of that epoch, from 0."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Task id -> rollouts it gets, of tasks that follow and may have been submitted."""

    def advanced(self, task_ids: Sequence[str]) -> Position:
        """The position after these tasks."""
        sizes = {name: size for name, size in self.sizes.items() if name not in task_ids}
        return replace(self, place=self.place + len(task_ids), sizes=sizes)

    def sized(self, sizes: Mapping[str, int]) -> Position:
        """The same with sizes of tasks; what was decided before stays."""
        return replace(self, sizes={**sizes, **self.sizes})

    def next_epoch(self) -> Position:
        """The beginning of the next pass."""
        return replace(self, epoch=self.epoch + 1, place=0)


@dataclass(frozen=True, slots=True)
class PositionFile:
    """A position that survives a crash; without a path it is kept nowhere."""

    path: Path | None
    """A small JSON file."""

    def load(self, source: str) -> Position:
        """The stored position, or the beginning if none was stored.

        Raises:
            ConfigError: the file is damaged, or its position refers to other tasks.
        """
        if self.path is None or not self.path.exists():
            return Position(source=source)
        try:
            stored = Position(**json.loads(self.path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"state_file {self.path} cannot be read: {error}") from error
        if stored.source != source:
            raise ConfigError(
                f"state_file {self.path} belongs to {stored.source!r}, not to {source!r}: "
                "undo the change, or begin anew without --resume"
            )
        return stored

    def save(self, position: Position) -> None:
        """Replace the stored position in one step.

        Raises:
            ConfigError: the file cannot be written.
        """
        if self.path is None:
            return
        partial = self.path.with_name(f"{self.path.name}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("w") as file:
                stored = asdict(position)
                if not position.sizes:  # an older release does not know them
                    del stored["sizes"]
                json.dump(stored, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
        except OSError as error:
            raise ConfigError(f"state_file {self.path}: {error.strerror}") from error
