"""Seconds of one decode step by batch size, for dispatch, migration and simulation.

StreamRL calls it PTL(BS), per-token latency (arXiv 2504.15930, Alg. 2); RLHFuse takes BS_max from
it (arXiv 2409.13221, inter-stage fusion). One table, so that all of them predict the same.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

Point = tuple[int, float]
"""A number and its measured seconds."""


def columns(table: Mapping[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The numbers of a table, ascending, and their seconds."""
    points = sorted(table.items())
    return tuple(number for number, _ in points), tuple(seconds for _, seconds in points)


def check_points(
    numbers: Sequence[int],
    seconds: Sequence[float],
    check: Callable[[Point, Point], None],
    *,
    before: Point,
    subject: str,
    unit: str,
) -> None:
    """Check each point against its predecessor; the first one against `before`.

    Raises:
        ValueError: there is no point, the lengths differ, or `check` raised it.
    """
    if not numbers or len(numbers) != len(seconds):
        raise ValueError(
            f"{subject} has {len(numbers)} {unit}s and {len(seconds)} times: "
            f"give at least one point, a time for each {unit}"
        )
    for point in zip(numbers, seconds, strict=True):
        check(point, before)
        before = point


_WEIGHT = 0.1
"""Of the newest measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLatency:
    """A measured table, piecewise linear between its points.

    Constant below the first point; extrapolated linearly beyond the last; a table of one point is
    constant everywhere.

    Example: DecodeLatency.of({8: 0.0085, 32: 0.010}).seconds(20) == 0.00925

    Raises:
        ValueError: no point, or one that is not positive, not finite or below its predecessor.
    """

    batches: tuple[int, ...]
    """Batch sizes measured, ascending."""
    step_seconds: tuple[float, ...]
    """Seconds of one decode step (one token for each sequence of the batch) at each of them."""

    def __post_init__(self) -> None:
        check_points(
            self.batches,
            self.step_seconds,
            _check,
            before=(0, 0.0),
            subject="decode latency",
            unit="batch size",
        )

    @classmethod
    def of(cls, table: Mapping[int, float]) -> Self:
        """From batch size -> seconds, in any order."""
        batches, step_seconds = columns(table)
        return cls(batches=batches, step_seconds=step_seconds)

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> Self:
        """From a TOML table, whose keys are text: `8 = 0.0085`.

        Raises:
            ValueError: a key that is no whole number, a value that is no number; see the class.
        """
        return cls.of({_batch(key): _seconds(key, value) for key, value in table.items()})

    def seconds(self, batch: float) -> float:
        """Seconds of one decode step of `batch` sequences."""
        batches, times = self.batches, self.step_seconds
        if batch <= batches[0] or len(batches) == 1:
            return times[0]
        right = min(bisect_right(batches, batch), len(batches) - 1)
        slope = (times[right] - times[right - 1]) / (batches[right] - batches[right - 1])
        return times[right - 1] + slope * (batch - batches[right - 1])

    def saturation(self, factor: float) -> int:
        """BS_max: the largest batch whose step takes at most `factor` times the fastest one.

        Up to it a larger batch is nearly free. At most the last batch measured.

        Raises:
            ValueError: `factor` below 1.
        """
        if not factor >= 1:
            raise ValueError(f"factor is {factor}: it must be at least 1")
        limit = factor * self.step_seconds[0]
        return bisect_right(range(1, self.batches[-1] + 1), limit, key=self.seconds)


class MeasuredLatency:
    """Smoothed decode latency from reports of servers, by powers of two of their batch size."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, num_turns: int, max_running: int, tokens_per_second: float) -> None:
        """Add the present rate of a server; one without turns or rate tells nothing.

        Args:
            num_turns: running and queued turns.
            max_running: turns decoded at once; 0: unknown.
            tokens_per_second: of all of them.
        """
        batch = min(num_turns, max_running or num_turns)
        if batch < 1 or not 0 < tokens_per_second < math.inf:
            return
        point = 1 << (batch.bit_length() - 1)
        seconds = batch / tokens_per_second
        before = self._seconds.setdefault(point, seconds)
        self._seconds[point] = before + _WEIGHT * (seconds - before)

    @property
    def latency(self) -> DecodeLatency | None:
        """The table, made monotonic in the batch size; None before the first report."""
        table: dict[int, float] = {}
        slowest = 0.0
        for batch in sorted(self._seconds):
            slowest = table[batch] = max(slowest, self._seconds[batch])
        return DecodeLatency.of(table) if table else None


def _check(point: Point, before: Point) -> None:
    (batch, seconds), (batch_before, seconds_before) = point, before
    if batch <= batch_before:
        raise ValueError(
            f"decode latency names batch size {batch} after {batch_before}: "
            "give positive batch sizes in ascending order, each once"
        )
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(
            f"decode latency at batch size {batch} is {seconds} s: give a positive, finite time"
        )
    if seconds < seconds_before:
        raise ValueError(
            f"decode latency at batch size {batch} is {seconds} s, below the {seconds_before} s of "
            f"batch size {batch_before}: a larger batch is never faster, measure both again"
        )


def _batch(key: str) -> int:
    if not key.isdecimal():
        raise ValueError(f"decode latency names batch size {key!r}: give a whole number")
    return int(key)


def _seconds(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(  # noqa: TRY004 -- a user's mistake
            f"decode latency at batch size {key} is {value!r}: give seconds as a number"
        )
    return float(value)
