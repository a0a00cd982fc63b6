"""Gradient chunks: consecutive whole groups of a step, each accumulated in one go.

StreamRL (arXiv 2504.15930): training starts on samples as they stream in; the gradient of a step
is the sum of the gradients of its chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from trainer.data.token_sequence import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientChunk:
    """Groups whose gradient is accumulated together."""

    sequences: Sequence[TokenSequence]
    """Of whole groups, members adjacent."""
    last: bool
    """True for the last chunk of the step."""


class GroupChunker:
    """Splits a step into chunks that depend only on the order of its groups.

    So a step repeated after a crash gets the same chunks whenever its groups arrive; gradients are
    summed in the same order, and the weights are equal bit for bit.
    """

    def __init__(self, num_tokens: int) -> None:
        """A chunk ends with the group that brings it to `num_tokens` tokens or more."""
        self.num_sequences = 0
        """Sequences of the step that have arrived."""
        self.num_groups = 0
        """Complete groups of the step that have arrived."""
        self._num_tokens = num_tokens
        self._incomplete: list[TokenSequence] = []
        self._chunk: list[TokenSequence] = []

    @property
    def has_open_group(self) -> bool:
        """Whether a group has arrived that may lack members."""
        return bool(self._incomplete)

    def push(
        self, fresh: Sequence[TokenSequence], *, group_complete: bool, last: bool
    ) -> Iterator[GradientChunk]:
        """Add sequences; yield the chunks they complete.

        Args:
            fresh: the next sequences of the step, members of a group adjacent.
            group_complete: the newest group has all its members.
            last: the step has all its groups; its last chunk may be empty.
        """
        self.num_sequences += len(fresh)
        self._incomplete += fresh
        groups = [list(members) for _, members in groupby(self._incomplete, _group)]
        self._incomplete = [] if group_complete or last or not groups else groups.pop()
        for group in groups:
            self.num_groups += 1
            self._chunk += group
            if sum(len(item.token_ids_T) for item in self._chunk) >= self._num_tokens:
                yield self._take_chunk(last=False)
        if last:
            yield self._take_chunk(last=True)

    def drop(self, group_ids: Collection[str]) -> None:
        """Forget what has arrived of incomplete groups, which left the step."""
        kept = [item for item in self._incomplete if item.group_id not in group_ids]
        self.num_sequences -= len(self._incomplete) - len(kept)
        self._incomplete = kept

    def _take_chunk(self, *, last: bool) -> GradientChunk:
        sequences, self._chunk = self._chunk, []
        return GradientChunk(sequences=sequences, last=last)


def _group(item: TokenSequence) -> str:
    return item.group_id
