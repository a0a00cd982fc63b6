"""Scorers of tests, as plug-ins."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from services.scoring.config import ScoringConfig
from services.scoring.scorer import Row

COLUMN = "length"


class Lengths:
    """A plug-in: each token's value is its place."""

    scored: list[str] = []  # noqa: RUF012 -- of all that were made
    began = threading.Event()
    going_on = threading.Event()

    def __init__(self, config: ScoringConfig) -> None:
        self._most = config.max_samples

    def score(self, rows: Sequence[Row]) -> Sequence[np.ndarray]:
        """When it may."""
        assert len(rows) <= self._most
        Lengths.began.set()
        Lengths.going_on.wait()
        Lengths.scored += [row.sample_id for row in rows]
        return [np.arange(len(row.token_ids_T), dtype=np.float32) for row in rows]


class Twice(Lengths):
    """Needs another column, and doubles it."""

    def score(self, rows: Sequence[Row]) -> Sequence[np.ndarray]:
        """All values of the other column."""
        return [2 * row.columns[COLUMN] for row in rows]


class Wrong(Lengths):
    """Gives one value too few for one sample, and what is no number for another."""

    def score(self, rows: Sequence[Row]) -> Sequence[np.ndarray]:
        """The others are right."""
        values = list(super().score(rows))
        for place, row in enumerate(rows):
            if row.sample_id.startswith("a/0"):
                values[place] = values[place][:-1]
            if row.sample_id.startswith("b/1"):
                values[place] = np.array([np.nan], np.float32)
        return values


class Fails(Lengths):
    """Fails on the samples of some rollouts, each time."""

    rollouts: tuple[str, ...] = ()
    """Beginnings of their names."""
    num_failures = 0

    def score(self, rows: Sequence[Row]) -> Sequence[np.ndarray]:
        """The others are right."""
        for row in rows:
            if row.sample_id.startswith(self.rollouts):
                Fails.num_failures += 1
                raise ValueError(f"cannot judge {row.sample_id}")
        return super().score(rows)


class Away(Lengths):
    """Fails the first times, as what it needs does not answer."""

    num_failures = 0

    def score(self, rows: Sequence[Row]) -> Sequence[np.ndarray]:
        """The values, later."""
        if Away.num_failures < 8:
            Away.num_failures += 1
            raise ConnectionError("the judge does not answer")
        return super().score(rows)


class Slow(Lengths):
    """Needs a third of a second for each sample."""

    def score(self, rows: Sequence[Row]) -> Sequence[np.ndarray]:
        """One after the other."""
        time.sleep(len(rows) / 3)
        return super().score(rows)


class Together(Lengths):
    """Begins when another one of its kind does."""

    others = threading.Barrier(2)

    def score(self, rows: Sequence[Row]) -> Sequence[np.ndarray]:
        """One sample at least is with the other."""
        self.others.wait(20)
        return super().score(rows)
