"""Seconds of a decode step by batch size."""

from __future__ import annotations

import random

import pytest

from services.lib.decode_latency import DecodeLatency, MeasuredLatency, Point, check_points, columns

STREAMRL = {8: 0.0085, 32: 0.010, 64: 0.0115, 128: 0.015, 256: 0.021, 512: 0.037}
"""7B on H800, read off a figure of arXiv 2504.15930."""


def test_measured_points_are_exact_and_the_rest_lies_on_the_lines() -> None:
    """Constant below the first point, linear between two, extrapolated beyond the last."""
    latency = DecodeLatency.of(STREAMRL)
    for batch, seconds in STREAMRL.items():
        assert latency.seconds(batch) == pytest.approx(seconds, rel=1e-12)
    assert latency.seconds(1) == 0.0085
    assert latency.seconds(20) == pytest.approx(0.00925)
    assert latency.seconds(1024) == pytest.approx(0.037 + 512 * 0.016 / 256)


def test_a_single_point_is_constant() -> None:
    """Nothing is known of how it grows."""
    latency = DecodeLatency.of({16: 0.01})
    assert {latency.seconds(batch) for batch in (1, 16, 1000)} == {0.01}
    assert latency.saturation(1.0) == 16


def test_saturation_is_the_largest_batch_within_the_factor() -> None:
    """Against trying every batch size, on random tables."""
    draw = random.Random(0)
    for _ in range(200):
        batches = sorted(draw.sample(range(1, 300), draw.randint(1, 6)))
        times = sorted(draw.uniform(0.001, 0.05) for _ in batches)
        latency = DecodeLatency.of(dict(zip(batches, times, strict=True)))
        factor = draw.uniform(1, 4)
        flat = [b for b in range(1, batches[-1] + 1) if latency.seconds(b) <= factor * times[0]]
        assert latency.saturation(factor) == max(flat)


def test_a_toml_table_gives_the_same_as_numbers_in_any_order() -> None:
    """Its keys are text."""
    expected = DecodeLatency.of({8: 0.0085, 32: 0.010})
    assert DecodeLatency.of({32: 0.010, 8: 0.0085}) == expected
    assert DecodeLatency.from_table({"32": 0.010, "8": 0.0085}) == expected


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, "at least one point"),
        ({"eight": 0.1}, "names batch size 'eight': give a whole number"),
        ({"8.0": 0.1}, "names batch size '8.0': give a whole number"),
        ({"8": "fast"}, "at batch size 8 is 'fast': give seconds as a number"),
        ({"8": True}, "at batch size 8 is True: give seconds as a number"),
        ({"0": 0.1}, "positive batch sizes"),
        ({"8": 0}, "at batch size 8 is 0.0 s: give a positive, finite"),
        ({"8": float("nan")}, "positive, finite"),
        (
            {"16": 0.1, "8": 0.2},
            "at batch size 16 is 0.1 s, below the 0.2 s of batch size 8: .* measure both again",
        ),
    ],
)
def test_an_invalid_table_is_a_value_error(table: dict[str, object], expected: str) -> None:
    """The message names the entry and the cure."""
    with pytest.raises(ValueError, match=expected):
        DecodeLatency.from_table(table)


def test_a_factor_below_one_is_a_value_error() -> None:
    """No batch is faster than the fastest."""
    with pytest.raises(ValueError, match=r"factor is 0\.9: it must be at least 1"):
        DecodeLatency.of(STREAMRL).saturation(0.9)


def test_latency_is_learned_from_what_servers_report() -> None:
    """By load; never faster for a larger batch; nothing known is nothing."""
    measured = MeasuredLatency()
    assert measured.latency is None
    reports = [(1, 100.0), (8, 800.0), (64, 4000.0), (128, 16_000.0), (5, 0.0), (0, 5.0)]
    for turns, tokens in reports:
        measured.add(turns, 256, tokens)
    latency = measured.latency
    assert latency is not None
    assert [latency.seconds(n) for n in (1, 8, 64, 128)] == [0.01, 0.01, 0.016, 0.016]


def test_turns_that_queue_are_not_in_the_batch() -> None:
    """An engine of four slots decodes four, however many it was given."""
    measured = MeasuredLatency()
    measured.add(64, 4, 400.0)
    assert measured.latency == DecodeLatency.of({4: 0.01})


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
