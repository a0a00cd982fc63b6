"""Scorers of tests, as plug-ins."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from services.scoring.config import ScoringConfig
from services.scoring.scorer import Row

COLUMN = "length"


class Lengths:
    """A plug-in: each token's value is its place."""

    scored: list[str] = []  # noqa: RUF012 -- of all that were made
    going_on = threading.Event()

    def __init__(self, config: ScoringConfig) -> None:
        self._most = config.max_samples

    def score(self, rows: Sequence[Row]) -> Sequence[np.ndarray]:
        """When it may."""
        assert len(rows) <= self._most
        Lengths.going_on.wait()
        Lengths.scored += [row.sample_id for row in rows]
        return [np.arange(len(row.token_ids_T), dtype=np.float32) for row in rows]


class Twice(Lengths):
    """Needs another column, and doubles it."""

    def score(self, rows: Sequence[Row]) -> Sequence[np.ndarray]:
        """All values of the other column."""
        return [2 * row.columns[COLUMN] for row in rows]


class Wrong(Lengths):
    """Gives what no column can hold."""

    def score(self, rows: Sequence[Row]) -> Sequence[np.ndarray]:
        """One value too few, then none that is a number."""
        return [np.zeros(len(row.token_ids_T) - 1, np.float32) for row in rows]


class NoNumber(Lengths):
    """Gives what nobody can reckon with."""

    def score(self, rows: Sequence[Row]) -> Sequence[np.ndarray]:
        """One value."""
        return [np.array([np.nan], np.float32) for _ in rows]
