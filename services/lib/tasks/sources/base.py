"""Interface of task sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Row", "Source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task of a source."""

    index: int
    """Position in the source, the same in every epoch."""
    values: Mapping[str, Any]
    """Fields by name."""
    where: str
    """For error messages: file and line, or function and position."""


class Source(Protocol):
    """Tasks in an order that depends on the source, the seed and the epoch alone."""

    @property
    def fingerprint(self) -> str:
        """Identifies the content: a stored position is valid only for the same fingerprint."""

    def rows(self, epoch: int, start: int) -> Iterator[Row]:
        """The rows of an epoch from position `start` on; reads lazily, and may block.

        Raises:
            ConfigError: a row is invalid; names it and the cure.
        """
