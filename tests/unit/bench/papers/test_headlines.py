"""What the headlines of the papers are measured by."""

from __future__ import annotations

from bench.papers.headlines import HEADLINES, rollouts_per_second, trained_tokens_per_second
from tools.provenance import ROOT

STEPS = [
    {"time": 10.0 + 2 * step, "num_rollouts": 8, "num_tokens": 60, "seconds": {"train": 0.5}}
    for step in range(4)
]


def test_the_step_before_the_first_one_counts_for_its_time_alone() -> None:
    """Three steps of 8 rollouts in 6 s, which were trained for 1.5 s."""
    assert rollouts_per_second(STEPS) == 4.0
    assert trained_tokens_per_second(STEPS) == 120.0


def test_each_side_is_an_example_and_the_sides_of_a_headline_differ() -> None:
    """Ours is the file as it is, or with what all sides of the headline have."""
    for name, headline in HEADLINES.items():
        sides = list(headline.sides.values())
        assert all((ROOT / f"examples/papers/{each.example}.toml").is_file() for each in sides)
        assert len({(each.example, each.flags) for each in sides}) == len(sides) > 1, name
