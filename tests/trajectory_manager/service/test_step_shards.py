"""Shards of a step: disjoint, complete, balanced."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trajectory_manager.service.step_shards import cut


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 10_000), max_size=60), st.integers(1, 12))
def test_no_shard_holds_more_than_the_mean_and_the_longest(lengths: list[int], shards: int) -> None:
    """Each sample is in one shard; the same lengths are always cut the same way."""
    chosen = cut(lengths, shards)
    assert len(chosen) == len(lengths)
    assert all(0 <= shard < shards for shard in chosen)
    loads = [
        sum(length for length, shard in zip(lengths, chosen, strict=True) if shard == index)
        for index in range(shards)
    ]
    assert sum(loads) == sum(lengths)
    assert max(loads) <= sum(lengths) / shards + max(lengths, default=0)
    assert cut(list(lengths), shards) == chosen


def test_dealing_in_turn_would_not_be_balanced() -> None:
    """The control: without the order by length a shard holds almost everything."""
    lengths = [100, 1] * 8
    in_turn = [sum(lengths[0::2]), sum(lengths[1::2])]
    assert max(in_turn) > sum(lengths) / 2 + max(lengths)
    chosen = cut(lengths, 2)
    by_length = [sum(n for n, s in zip(lengths, chosen, strict=True) if s == i) for i in (0, 1)]
    assert max(by_length) == sum(lengths) / 2
