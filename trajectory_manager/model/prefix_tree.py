"""The turns of a rollout as a prefix tree: sequences, and which tokens each sample trains.

A turn shares the first `prefix_length` tokens of its prefix turn's whole sequence and adds its own.
Turns only grow, so a match stays valid.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trajectory_manager.model.tokens import BYTES_PER_TOKEN, Span, Turn, cut_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Own tokens [0, stop) of a turn, as part of a longer sequence."""

    turn_id: str
    """The turn that added them."""
    stop: int
    """Own tokens of that turn in the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan:
    """A root-to-leaf sequence and the part of each piece that it trains."""

    leaf_turn_id: str
    pieces: tuple[Piece, ...]
    """From the root."""
    trained_from: tuple[int, ...]
    """Per piece: own tokens before this index are trained by an earlier sample."""


class PrefixTree:
    """The turns of one rollout and how many tokens each added."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        """`turns` in the order they began, each with at least its spans."""
        self._turns = {turn.turn_id: turn for turn in turns}
        self._lengths = {turn.turn_id: turn.length for turn in turns}

    def whole_length(self, turn_id: str) -> int:
        """Tokens of the turn's whole sequence, shared ones included."""
        return self._turns[turn_id].prefix_length + self._lengths[turn_id]

    def pieces(self, turn_id: str, length: int | None = None) -> tuple[Piece, ...]:
        """The first `length` tokens (default: all) of the turn's whole sequence, from the root."""
        remaining = self.whole_length(turn_id) if length is None else length
        pieces: list[Piece] = []
        while remaining > 0:
            turn = self._turns[turn_id]
            if remaining > turn.prefix_length:
                pieces.append(Piece(turn_id=turn_id, stop=remaining - turn.prefix_length))
                remaining = turn.prefix_length
            turn_id = turn.prefix_turn_id
        return tuple(reversed(pieces))

    def is_whole(self, piece: Piece) -> bool:
        """Whether the piece has all tokens of its turn."""
        return piece.stop == self._lengths[piece.turn_id]

    def leaves(self) -> Iterator[str]:
        """Turns with own tokens that no turn with own tokens continues to the end, oldest first."""
        continued = set[str]()
        for turn_id, length in self._lengths.items():
            path = self.pieces(turn_id)
            # A turn without own tokens shares the leaf of the turn it continues.
            whole = path[:-1] if length else ()
            continued.update(piece.turn_id for piece in whole if self.is_whole(piece))
        yield from (name for name, n in self._lengths.items() if n and name not in continued)

    def sample_plans(
        self, spans: Mapping[str, Sequence[Span]], untrained: Collection[str] = ()
    ) -> Iterator[SamplePlan]:
        """One plan per leaf that trains something; a token is trained by the first that has it.

        Leaves among `untrained` come last, so that what they share is trained in other samples.
        """
        trained = dict.fromkeys(self._turns, 0)
        for leaf in sorted(self.leaves(), key=lambda leaf: leaf in untrained):
            pieces = self.pieces(leaf)
            trained_from = tuple(trained[piece.turn_id] for piece in pieces)
            pairs = list(zip(pieces, trained_from, strict=True))
            if not any(
                span.trainable
                for piece, start in pairs
                for span in cut_spans(spans[piece.turn_id], start, piece.stop)
            ):
                continue
            for piece, start in pairs:
                trained[piece.turn_id] = max(start, piece.stop)
            yield SamplePlan(leaf_turn_id=leaf, pieces=pieces, trained_from=trained_from)


def message_keys(turns: Sequence[Turn]) -> dict[str, tuple[str, ...]]:
    """Keys of each turn's conversation, with its answer; `turns` in the order they began."""
    whole: dict[str, tuple[str, ...]] = {"": ()}
    for turn in turns:
        matched = whole[turn.prefix_turn_id][: turn.num_matched_messages]
        answer = (turn.answer_key,) if turn.answer_key else ()
        whole[turn.turn_id] = (*matched, *turn.new_message_keys, *answer)
    return whole


def common_tokens(first: bytes, second: bytes) -> int:
    """Length of the common prefix of two int32 arrays, in tokens."""
    size = min(len(first), len(second))
    if first[:size] == second[:size]:
        return size // BYTES_PER_TOKEN
    low, high = 0, size // BYTES_PER_TOKEN
    while high - low > 1:
        middle = (low + high) // 2
        window = slice(low * BYTES_PER_TOKEN, middle * BYTES_PER_TOKEN)
        if first[window] == second[window]:
            low = middle
        else:
            high = middle
    return low
