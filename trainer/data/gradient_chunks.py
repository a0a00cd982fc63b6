"""The parts of a step that are computed one after the other: rounds of whole groups.

StreamRL (arXiv 2504.15930): training starts on samples as they stream in; the gradient of the step
is the sum of what its parts give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from trainer.data.token_sequence import TokenSequence

__all__ = ["Part", "Rounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is computed at once."""

    sequences: Sequence[TokenSequence]
    """Of whole groups, members adjacent."""
    last: bool
    """Nothing of the step follows."""


class Rounds:
    """Cuts a step into parts by the order of its groups alone.

    So the parts of a step that is repeated after a crash are what they were, whenever groups
    arrive, and their sums are added in the same order: the weights are equal bit for bit.
    """

    def __init__(self, num_tokens: int) -> None:
        """A part ends with the group that brings it to `num_tokens` or more."""
        self.num_arrived = 0
        """Sequences of the step that are here."""
        self.num_groups = 0
        """Of these, groups that have all their members."""
        self._num_tokens = num_tokens
        self._arrived: list[TokenSequence] = []
        self._open: list[TokenSequence] = []

    @property
    def unsettled(self) -> bool:
        """Whether a group is here that may lack members."""
        return bool(self._arrived)

    def cut(self, fresh: Sequence[TokenSequence], *, settled: bool, last: bool) -> Iterator[Part]:
        """The parts that are whole with what is `fresh`.

        Args:
            fresh: sequences that follow on those before, members of a group adjacent.
            settled: the newest group has all its members.
            last: so has the step; the last part may be empty.
        """
        self.num_arrived += len(fresh)
        self._arrived += fresh
        groups = [list(members) for _, members in groupby(self._arrived, _group)]
        self._arrived = [] if settled or last or not groups else groups.pop()
        for group in groups:
            self.num_groups += 1
            self._open += group
            if sum(len(item.token_ids_T) for item in self._open) >= self._num_tokens:
                yield self._closed(last=False)
        if last:
            yield self._closed(last=True)

    def _closed(self, *, last: bool) -> Part:
        sequences, self._open = self._open, []
        return Part(sequences=sequences, last=last)


def _group(item: TokenSequence) -> str:
    return item.group_id
