"""Whose keys and values can be copied instead of computed: running sequences and recent ones.

A prefix is found by the hash of its first 16, 32, ... tokens, and of its whole prompt; the tokens
themselves are compared before anything is copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Donor", "PrefixIndex"]

_BLOCK = 16


@dataclass(slots=True, eq=False)
class Donor:
    """A sequence whose prefixes others may copy."""

    token_ids: list[int]
    """Grows while the sequence runs."""
    lane: int | None
    """Where it is cached while it runs."""
    cached: int = 0
    """How many positions of it are."""
    copy: Any = None
    """What was cached, once it has ended."""
    offers: dict[int, int] = field(default_factory=dict)
    """Length of each prefix it is found by, by its key."""


class PrefixIndex:
    """Finds the longest known prefix. Everything in it was computed by the weights in use."""

    def __init__(self, keep: int) -> None:
        """Keep this many sequences that have ended, the latest."""
        self._keep = keep
        self._donors: dict[int, Donor] = {}
        self._ended: OrderedDict[Donor, None] = OrderedDict()

    def find(self, token_ids: list[int]) -> tuple[Donor, int] | None:
        """Return who has, or is about to have, the most of all but the last of `token_ids`."""
        for key, length in reversed(list(_prefixes(token_ids, len(token_ids) - 1))):
            donor = self._donors.get(key)
            if donor is not None and donor.token_ids[:length] == token_ids[:length]:
                if donor in self._ended:
                    self._ended.move_to_end(donor)
                return donor, _extend(donor, token_ids, length)
        return None

    def begin(self, token_ids: list[int], lane: int) -> Donor:
        """Offer a sequence that begins to be cached at `lane`: all but its last token."""
        donor = Donor(token_ids, lane)
        for key, length in _prefixes(token_ids, len(token_ids) - 1):
            donor.offers[key] = length
            self._donors.setdefault(key, donor)
        return donor

    def end(self, donor: Donor, copy: Any) -> None:
        """Keep a copy of what a sequence has cached, for whoever continues it."""
        self.forget(donor)
        donor.lane, donor.copy = None, copy
        donor.token_ids = donor.token_ids[: donor.cached]
        donor.offers |= dict(_prefixes(donor.token_ids, donor.cached))
        for key, length in donor.offers.items():
            if length <= donor.cached:
                # The latest to end is kept longest.
                self._donors[key] = donor
        self._ended[donor] = None
        if len(self._ended) > self._keep:
            self.forget(self._ended.popitem(last=False)[0])

    def forget(self, donor: Donor) -> None:
        """Offer a sequence no more."""
        for key in donor.offers:
            if self._donors.get(key) is donor:
                del self._donors[key]

    def clear(self) -> None:
        """Forget everything, as new weights demand."""
        self._donors.clear()
        self._ended.clear()


def _extend(donor: Donor, token_ids: list[int], length: int) -> int:
    """Lengthen a prefix by what else the donor has cached of it."""
    most = min(donor.cached, len(token_ids) - 1)
    while length < most and donor.token_ids[length] == token_ids[length]:
        length += 1
    return length


def _prefixes(token_ids: list[int], positions: int) -> Iterator[tuple[int, int]]:
    """Yield key and length of each prefix of `positions` tokens, ascending."""
    key = 0
    for end in (*range(_BLOCK, positions, _BLOCK), positions):
        key = hash((key, *token_ids[end - 1 - (end - 1) % _BLOCK : end]))
        if end > 0:
            yield key, end
