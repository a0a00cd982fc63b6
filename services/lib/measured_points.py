"""Tables of measured seconds by a whole number, such as nodes or a batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
