"""Interface of task sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task of a source."""

    index: int
    """Position in the source, the same in every epoch."""
    values: Mapping[str, Any]
    where: str
    """For error messages: file and line, or function and position."""
    problem: str = ""
    """Why it cannot be read, with the cure; empty: it can."""


class Source(Protocol):
    """Tasks in an order that depends on the source, the seed and the epoch alone."""

    @property
    def fingerprint(self) -> str:
        """Identifies the source as release 0.2 does, whose positions have it alone."""

    @property
    def content(self) -> str:
        """A digest of all tasks: a stored position is valid only for the same. "": none is known.

        The same for a copy at another place and time; computed once.
        """

    def rows(self, epoch: int, start: int) -> Iterator[Row]:
        """The rows of an epoch from position `start` on; reads lazily, and may block."""
