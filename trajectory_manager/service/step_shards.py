"""The partition of a step into shards for the ranks of a trainer."""

from __future__ import annotations

from collections.abc import Sequence


def cut(num_tokens: Sequence[int], num_shards: int) -> list[int]:
    """The shard of each sample: the longest first, each into the shard with the fewest tokens.

    Deterministic. No shard holds more than the mean of all shards and the
    longest sample together (Graham 1969).
    """
    loads, shards = [0] * num_shards, [0] * len(num_tokens)
    for index in sorted(range(len(num_tokens)), key=lambda index: (-num_tokens[index], index)):
        shards[index] = loads.index(min(loads))
        loads[shards[index]] += num_tokens[index]
    return shards
