"""The dataloader's position on disk, written after tasks are acknowledged.

Group sizes are written before their tasks are sent: decided again after a crash, they could differ
for the same task.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from services.chassis.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The next task to submit."""

    source: str
    """Fingerprint of source, order, run and purpose, as release 0.2 has it."""
    content: str = ""
    """The same with a digest of the tasks; "": it is not known. With another one, or where it is
    not known with another `source`, the position is invalid."""
    epoch: int = 0
    """Pass over the source, from 0."""
    place: int = 0
    """Place in the order of that epoch, from 0."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Task id -> group size, of following tasks that may have been submitted."""

    def advanced(self, num_rows: int, task_ids: Sequence[str]) -> Position:
        """The position after these rows, with the ids of those that are tasks."""
        sizes = {name: size for name, size in self.sizes.items() if name not in task_ids}
        return replace(self, place=self.place + num_rows, sizes=sizes)

    def sized(self, sizes: Mapping[str, int]) -> Position:
        """The position with added group sizes; existing ones are kept."""
        return replace(self, sizes={**sizes, **self.sizes})

    def next_epoch(self) -> Position:
        """The start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, place=0)


@dataclass(frozen=True, slots=True)
class PositionFile:
    """File of a position, written atomically; without a path nothing is stored."""

    path: Path | None
    """A small JSON file."""

    def load(self, start: Position) -> Position:
        """The stored position, or `start` if there is none.

        Raises:
            ConfigError: the file is damaged, or its position refers to other tasks.
        """
        if self.path is None or not self.path.exists():
            return start
        try:
            stored = _position(self.path.read_text())
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"state_file {self.path} cannot be read: {error}") from error
        is_known = bool(stored.content)
        was, now = (each.content if is_known else each.source for each in (stored, start))
        if was != now:
            raise ConfigError(
                f"state_file {self.path} belongs to other tasks, or to another run or order: it "
                f"has {was!r}, and now it is {now!r}: undo the change, or start over without "
                "--resume"
            )
        return replace(stored, source=start.source, content=start.content)

    def save(self, position: Position) -> None:
        """Replace the stored position atomically.

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
                if not position.sizes:  # older releases do not know the field
                    del stored["sizes"]
                json.dump(stored, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
        except OSError as error:
            raise ConfigError(f"state_file {self.path}: {error.strerror}") from error


def _position(text: str) -> Position:
    """Read a position of this release or a neighbouring one, whose further fields are ignored."""
    known = {each.name for each in fields(Position)}
    return Position(**{k: v for k, v in json.loads(text).items() if k in known})
