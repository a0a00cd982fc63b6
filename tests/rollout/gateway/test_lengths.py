"""Expected lengths: learned from turns that ended."""

from __future__ import annotations

import pytest

from rollout.gateway.lengths import RunningMeans, remaining


def test_a_group_has_its_own_mean_and_others_the_runs() -> None:
    """Nothing is known before the first turn has ended."""
    means = RunningMeans()
    assert means.expected("a") is None
    for length in (10, 30):
        means.ended("a", length)
    means.ended("b", 80)
    assert (means.expected("a"), means.expected("b"), means.expected("c")) == (20, 80, 40)


def test_the_run_forgets_old_lengths() -> None:
    """The policy in training changes them; a mean over everything would lag behind."""
    means = RunningMeans()
    for _ in range(5000):
        means.ended("a", 10)
    for _ in range(1500):
        means.ended("a", 1000)
    assert means.expected("new") == pytest.approx(1000, rel=0.01)


def test_groups_are_bounded() -> None:
    """The one whose last turn ended first is forgotten; it falls back to the run's mean."""
    means = RunningMeans(max_groups=2)
    for group, length in (("a", 10), ("b", 20), ("a", 10), ("c", 30)):
        means.ended(group, length)
    assert (means.expected("a"), means.expected("b")) == (10, 17.5)


@pytest.mark.parametrize(
    ("expected", "sampled", "most", "rest"),
    [
        (None, 0, 500, 500),
        (100.0, 0, 500, 100),
        (100.0, 30, 470, 70),
        (100.0, 90, 410, 90),
        (100.0, 300, 200, 200),
        (1000.0, 0, 500, 500),
        (0.0, 0, 500, 1),
    ],
)
def test_what_remains_of_a_turn(
    expected: float | None, sampled: int, most: int, rest: float
) -> None:
    """At most what it may sample; whoever outlived the mean is in the long tail."""
    assert remaining(expected, sampled, most) == rest
