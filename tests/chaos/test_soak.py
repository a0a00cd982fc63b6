"""The slopes and limits of the soak."""

from __future__ import annotations

from random import Random

from tests.chaos.soak.faults import KINDS, draw
from tests.chaos.soak.memory import Sample, mib_per_hour


def samples(process: str, *starts: tuple[float, float]) -> list[Sample]:
    """Forty minutes of each start: its level, and MiB per hour."""
    return [
        Sample(process, pid, 60.0 * minute, level + slope * minute / 60, 10)
        for pid, (level, slope) in enumerate(starts)
        for minute in range(40)
    ]


def test_a_leak_is_seen_whatever_the_level_of_each_start() -> None:
    """Flat at several levels is flat; growth counts in each start."""
    found = mib_per_hour(
        [*samples("flat", (100, 0), (300, 0)), *samples("leak", (50, 90), (9, 90))]
    )
    assert found == {"flat": 0.0, "leak": 90.0}


def test_the_first_minutes_do_not_count() -> None:
    """A process that loads its model does not leak; one that was just started has no slope."""
    loading = [Sample("loading", 1, 60.0 * m, 50.0 * min(m, 10), 10) for m in range(40)]
    young = [Sample("young", 1, 60.0 * m, 50.0 * m, 10) for m in range(10)]
    assert mib_per_hour([*loading, *young]) == {"loading": 0.0}


def test_faults_are_of_every_kind_and_process_and_follow_the_seed() -> None:
    """The same seed, the same faults."""
    drawn = [[draw(random, "abc") for _ in range(100)] for random in (Random(1), Random(1))]
    assert drawn[0] == drawn[1]
    assert {fault.kind for fault in drawn[0]} == set(KINDS)
    assert {fault.process for fault in drawn[0]} == set("abc")
