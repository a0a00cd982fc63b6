"""The prefix index: keys and values of running and recent sequences that others can copy.

A prefix is found by the hash of its first 16, 32, ... tokens, and of its whole prompt; the tokens
themselves are compared before anything is copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_BLOCK = 16


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """A sequence whose cached prefix others may copy."""

    token_ids: list[int]
    """Grows while the sequence runs."""
    slot: int | None
    """Its slot while it runs; None once it has ended."""
    rotation: int = 0
    """What its keys are rotated by (`RowModel.rotation`)."""
    cached: int = 0
    """Number of cached positions."""
    copy: Any = None
    """Copy of its cached keys and values, once it has ended."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Length of each prefix it is found by, by its key."""


class PrefixIndex:
    """Finds the longest cached prefix. All entries were computed by the current weights."""

    def __init__(self, keep: int) -> None:
        """Keep the latest `keep` sequences that have ended."""
        self._keep = keep
        self._entries: dict[int, CachedPrefix] = {}
        self._ended: OrderedDict[CachedPrefix, None] = OrderedDict()

    def find(self, token_ids: list[int], rotation: int = 0) -> tuple[CachedPrefix, int] | None:
        """Return the entry with the longest prefix of `token_ids[:-1]`, and that length.

        Its keys are rotated by `rotation`.
        """
        for key, length in reversed(list(_prefixes(token_ids, len(token_ids) - 1, rotation))):
            entry = self._entries.get(key)
            if (
                entry is not None
                and entry.rotation == rotation
                and entry.token_ids[:length] == token_ids[:length]
            ):
                if entry in self._ended:
                    self._ended.move_to_end(entry)
                return entry, _extend(entry, token_ids, length)
        return None

    def begin(self, token_ids: list[int], slot: int, rotation: int = 0) -> CachedPrefix:
        """Add a sequence in `slot`: all but its last token."""
        entry = CachedPrefix(token_ids, slot, rotation)
        for key, length in _prefixes(token_ids, len(token_ids) - 1, rotation):
            entry.lengths[key] = length
            self._entries.setdefault(key, entry)
        return entry

    def end(self, entry: CachedPrefix, copy: Any) -> None:
        """Keep a copy of an ended sequence's cache for its continuations."""
        self.forget(entry)
        entry.slot, entry.copy = None, copy
        entry.token_ids = entry.token_ids[: entry.cached]
        entry.lengths |= dict(_prefixes(entry.token_ids, entry.cached, entry.rotation))
        for key, length in entry.lengths.items():
            if length <= entry.cached:
                # The latest to end is kept longest.
                self._entries[key] = entry
        self._ended[entry] = None
        if len(self._ended) > self._keep:
            self.forget(self._ended.popitem(last=False)[0])

    def forget(self, entry: CachedPrefix) -> None:
        for key in entry.lengths:
            if self._entries.get(key) is entry:
                del self._entries[key]

    def clear(self) -> None:
        """Remove all entries, because the weights changed."""
        self._entries.clear()
        self._ended.clear()


def _extend(entry: CachedPrefix, token_ids: list[int], length: int) -> int:
    """Extend a matched prefix by further equal cached tokens."""
    most = min(entry.cached, len(token_ids) - 1)
    while length < most and entry.token_ids[length] == token_ids[length]:
        length += 1
    return length


def _prefixes(token_ids: list[int], positions: int, rotation: int = 0) -> Iterator[tuple[int, int]]:
    """Yield key and length of each prefix of `positions` tokens, ascending."""
    key = rotation
    for end in (*range(_BLOCK, positions, _BLOCK), positions):
        key = hash((key, *token_ids[end - 1 - (end - 1) % _BLOCK : end]))
        if end > 0:
            yield key, end
