"""Tables of measured seconds are whole, and checked point by point."""

from __future__ import annotations

import pytest

from services.lib.decode_latency import Point, check_points, columns


def test_columns_ascend() -> None:
    """However the table was written."""
    assert columns({8: 1.0, 2: 3.0}) == ((2, 8), (3.0, 1.0))
    assert columns({}) == ((), ())


def test_each_point_is_checked_against_the_one_before() -> None:
    """The first against what is given."""
    seen: list[tuple[Point, Point]] = []
    check_points(
        (2, 8),
        (3.0, 1.0),
        lambda point, before: seen.append((point, before)),
        before=(0, 9.0),
        subject="s",
        unit="node",
    )
    assert seen == [((2, 3.0), (0, 9.0)), ((8, 1.0), (2, 3.0))]


@pytest.mark.parametrize(("numbers", "seconds"), [((), ()), ((1, 2), (1.0,)), ((1,), (1.0, 2.0))])
def test_a_table_that_is_not_whole_is_an_error(
    numbers: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    """It names how many there are of each."""
    with pytest.raises(ValueError, match=f"{len(numbers)} nodes and {len(seconds)} times"):
        check_points(numbers, seconds, print, before=(0, 0.0), subject="s", unit="node")
