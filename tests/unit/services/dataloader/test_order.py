"""The shuffled order."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.lib.tasks.order import Permutation


@given(count=st.integers(1, 500), seed=st.integers(0, 2**40))
def test_every_element_comes_once(count: int, seed: int) -> None:
    """It is a permutation, whatever the size."""
    order = Permutation(count, seed=seed, name="0")
    assert sorted(order[place] for place in range(count)) == list(range(count))


def test_it_depends_on_seed_and_name_alone() -> None:
    """The same arguments give the same order, others another."""

    def order(seed: int, name: str) -> list[int]:
        return [Permutation(100, seed=seed, name=name)[place] for place in range(100)]

    assert order(1, "0") == order(1, "0")
    assert len({tuple(order(seed, name)) for seed in (1, 2) for name in ("0", "1")}) == 4


def test_a_place_in_a_huge_order_costs_nothing() -> None:
    """No list is made: a place of 10^12 is computed at once."""
    order = Permutation(10**12, seed=0, name="0")
    assert len({order[place] for place in range(1000)}) == 1000


def test_the_order_is_shuffled() -> None:
    """Neighbours end up far apart: places and elements do not correlate over many seeds."""
    count = 64
    correlations = [
        statistics.correlation(
            range(count), [Permutation(count, seed=seed, name="0")[i] for i in range(count)]
        )
        for seed in range(100)
    ]
    # The mean of 100 correlations of 64 pairs has standard deviation 1/sqrt(63 * 100) = 0.013.
    assert abs(statistics.mean(correlations)) < 0.06


@pytest.mark.parametrize("place", [-1, 3])
def test_places_out_of_range_are_index_errors(place: int) -> None:
    """An index error, as for a list."""
    with pytest.raises(IndexError):
        Permutation(3, seed=0, name="0")[place]
