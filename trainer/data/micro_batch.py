"""Split the sequences of a step into micro-batches for the ranks.

Packed, a micro-batch is a budget of tokens, and sequences of a group stay adjacent so that a shared
prefix is computed once (`packing.py`). Padded, a micro-batch has rows of similar length.

Shape suffixes: N sequences of the step, B rows of a micro-batch, T tokens (padded on the right).
"""
# ruff: noqa: N806, N815 -- arrays carry shape suffixes

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.lib.transformer.shared_prefix import shared_tokens
from trainer.data.advantages import SequenceAdvantages
from trainer.data.token_sequence import TokenSequence

__all__ = ["MicroBatch", "plan_micro_batches", "weightless"]

_PAD = 0
_PASS_TOKENS = 128
"""Fixed cost of a forward and backward pass, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The rows of one forward and backward pass on one rank."""

    token_ids_BT: NDArray[np.int32]
    """Vocabulary ids, padded on the right."""
    behaviour_logprobs_BT: NDArray[np.float32]
    """As in `TokenSequence`."""
    reference_logprobs_BT: NDArray[np.float32]
    """As in `TokenSequence`."""
    loss_mask_BT: NDArray[np.bool_]
    """False on padding."""
    weight_versions_BT: NDArray[np.int64]
    """As in `TokenSequence`."""
    lengths_B: NDArray[np.int64]
    """Tokens of each row without padding."""
    rollouts_B: NDArray[np.int64]
    """Number of each row's rollout; for comparison only."""
    groups_B: NDArray[np.int64]
    """Number of each row's group."""
    advantages_B: NDArray[np.float64]
    """Advantage of each row's rollout."""
    weights_B: NDArray[np.float64]
    """Weight of each trainable token of a row."""
    bootstrap_B: NDArray[np.bool_]
    """As in `SequenceAdvantages`."""
    temperatures_BT: NDArray[np.float32]
    """As in `TokenSequence`; 1 on padding."""
    turn_rewards_BT: NDArray[np.float32]
    """Reward of a turn at the last trainable token up to its end, or at its end if none is."""


def plan_micro_batches(
    sequences: Sequence[TokenSequence],
    advantages: SequenceAdvantages,
    *,
    num_ranks: int,
    micro_batch_tokens: int,
    packed: bool = True,
    whole_groups: bool = False,
    at_least: int = 1,
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Split a step into micro-batches, the same number for every rank.

    Ranks get about the same number of tokens. Sequences without a trainable token are dropped; a
    rank with fewer micro-batches gets some of zero weight. A sequence (or group) that exceeds the
    budget has a separate micro-batch.

    Args:
        sequences: of the step, or of a gradient chunk.
        advantages: of the same sequences.
        num_ranks: number of ranks.
        micro_batch_tokens: budget of a micro-batch, padding included.
        packed: compute without padding.
        whole_groups: never split a group.
        at_least: micro-batches of a rank, if it has as many sequences of about equal length.

    Returns:
        The micro-batches of each rank.
    """
    lengths = [len(item.token_ids_T) for item in sequences]
    numbering = _Numbering(sequences)
    rows = [row for row in np.argsort(numbering.groups_N, kind="stable").tolist() if lengths[row]]
    if packed or whole_groups:
        rows.sort(key=lambda row: (numbering.groups_N[row], sequences[row].token_ids_T.tolist()))
        groups = [list(members) for _, members in groupby(rows, numbering.groups_N.__getitem__)]
        units = groups if whole_groups else [[row] for row in rows]
        sizes = _Sizes(sequences, rows, packed)
        shares = _line(units, sizes, num_ranks, micro_batch_tokens, at_least)
    else:
        shares = _by_length(rows, lengths, num_ranks, micro_batch_tokens)
    most = max(map(len, shares))
    return tuple(
        tuple(_stack(sequences, advantages, numbering, rows) for rows in share)
        + (weightless(),) * (most - len(share))
        for share in shares
    )


class _Numbering:
    """Numbers of rollouts and groups, in order of first occurrence."""

    def __init__(self, sequences: Sequence[TokenSequence]) -> None:
        self.rollouts_N = _numbered([item.rollout_id for item in sequences])
        self.groups_N = _numbered([item.group_id for item in sequences])


def _numbered(names: Sequence[str]) -> NDArray[np.int64]:
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return np.array([places[name] for name in names], np.int64)


class _Sizes:
    """The cost of consecutive rows, in tokens."""

    def __init__(
        self, sequences: Sequence[TokenSequence], rows: Sequence[int], packed: bool
    ) -> None:
        self._packed = packed
        self._lengths = {row: len(sequences[row].token_ids_T) for row in rows}
        # In lexicographic order, a row has the longest common prefix with its predecessor.
        pairs = pairwise(rows)
        self._shared = {
            after: shared_tokens(sequences[row].token_ids_T, sequences[after].token_ids_T)
            for row, after in (pairs if packed else ())
        }

    def fits(self, piece: Sequence[Sequence[int]], budget: int) -> bool:
        """Whether a micro-batch is within budget, or no larger than one of its units."""
        return self.alone(piece) <= max([budget, *(self.alone([unit]) for unit in piece)])

    def added_after(self, unit: Sequence[int]) -> int:
        """Cost of a unit that follows its predecessor in the same micro-batch."""
        return sum(self._lengths[row] - self._shared.get(row, 0) for row in unit)

    def alone(self, piece: Sequence[Sequence[int]]) -> int:
        """Cost of units as a separate micro-batch."""
        rows = [row for unit in piece for row in unit]
        if not rows:
            return 0
        if not self._packed:
            return max(self._lengths[row] for row in rows) * len(rows)
        return self.added_after(rows) + self._shared.get(rows[0], 0)


def _line(
    units: Sequence[list[int]], sizes: _Sizes, num_ranks: int, budget: int, at_least: int
) -> list[list[list[int]]]:
    """Split consecutive units evenly over ranks, then into the fewest micro-batches that fit."""
    shares = _evenly(units, sizes, num_ranks)
    for parts in count(at_least):
        cuts = [_evenly(share, sizes, parts) for share in shares]
        pieces = [piece for cut in cuts for piece in cut]
        if all(sizes.fits(piece, budget) for piece in pieces):
            break
    return [[[row for unit in piece for row in unit] for piece in cut if piece] for cut in cuts]


def _evenly(units: Sequence[list[int]], sizes: _Sizes, parts: int) -> list[list[list[int]]]:
    """Split consecutive units into parts of equal cost, by the middle of each unit."""
    tokens = np.array([sizes.added_after(unit) for unit in units], np.float64)
    middles = np.cumsum(tokens) - tokens / 2
    places = np.minimum(middles / max(tokens.sum(), 1.0) * parts, parts - 1).astype(int)
    found: list[list[list[int]]] = [[] for _ in range(parts)]
    for unit, place in zip(units, places, strict=True):
        found[place].append(unit)
    return found


def _by_length(
    rows: Sequence[int], lengths: Sequence[int], num_ranks: int, budget: int
) -> list[list[list[int]]]:
    """Group rows of similar length; rows are dealt to the ranks in serpentine order."""
    order = sorted(rows, key=lambda row: (-lengths[row], row))
    return [
        _cut(list(_dealt(order, rank, num_ranks)), lengths, budget) for rank in range(num_ranks)
    ]


def _dealt(order: Sequence[int], rank: int, num_ranks: int) -> Iterator[int]:
    """A rank's rows in serpentine order: 0, 1, ..., n, n, ..., 1, 0, 0, 1, ..."""
    for number, start in enumerate(range(0, len(order), num_ranks)):
        seat = rank if number % 2 == 0 else num_ranks - 1 - rank
        yield from order[start : start + num_ranks][seat : seat + 1]


def _cut(rows: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """The cheapest split of `rows` (longest first) into runs of at most `budget` padded tokens.

    Dynamic programming over the end of the last run; a run costs its padded tokens plus a constant.
    """
    cheapest, begins = [0], [0]
    for end in range(1, len(rows) + 1):
        costs = []
        for begin in range(end - 1, -1, -1):
            padded = lengths[rows[begin]] * (end - begin)
            if padded > budget and end - begin > 1:
                break
            costs.append((cheapest[begin] + padded + _PASS_TOKENS, begin))
        cost, begin = min(costs)
        cheapest.append(cost)
        begins.append(begin)
    cuts: list[list[int]] = []
    end = len(rows)
    while end:
        cuts.append(list(rows[begins[end] : end]))
        end = begins[end]
    return cuts[::-1]


def _stack(
    sequences: Sequence[TokenSequence],
    advantages: SequenceAdvantages,
    numbering: _Numbering,
    rows: Sequence[int],
) -> MicroBatch:
    members = [sequences[row] for row in rows]
    kept = list(rows)
    return MicroBatch(
        token_ids_BT=_padded([member.token_ids_T for member in members]),
        behaviour_logprobs_BT=_padded([member.behaviour_logprobs_T for member in members]),
        reference_logprobs_BT=_padded([member.reference_logprobs_T for member in members]),
        loss_mask_BT=_padded([member.loss_mask_T for member in members]),
        weight_versions_BT=_padded([member.weight_versions_T for member in members]),
        lengths_B=np.array([len(member.token_ids_T) for member in members], np.int64),
        rollouts_B=numbering.rollouts_N[kept],
        groups_B=numbering.groups_N[kept],
        advantages_B=advantages.advantages_N[kept],
        weights_B=advantages.weights_N[kept],
        bootstrap_B=advantages.bootstrap_N[kept],
        temperatures_BT=_padded([member.temperatures_T for member in members], 1),
        turn_rewards_BT=_padded(
            [_turn_rewards(sequences[row], advantages.turn_rewards_N[row]) for row in rows]
        ),
    )


def _turn_rewards(item: TokenSequence, rewards: Sequence[tuple[int, float]]) -> NDArray[np.float32]:
    """The rewards of turns, where the sequence's tokens can be credited with them.

    That of a turn which is not trained counts for the actions before it. Without any, it stays at
    the turn's end, where no action has it: what is sampled later did not earn it.
    """
    placed_T = np.zeros(len(item.token_ids_T), np.float32)
    for end, value in rewards:
        trainable = item.loss_mask_T[:end].nonzero()[0]
        # Nothing predicts the first token: losses begin with the second one.
        placed_T[trainable[-1] if len(trainable) else max(end - 1, 1)] += value
    return placed_T


def _padded(values: Sequence[NDArray[Any]], padding: float = _PAD) -> NDArray[Any]:
    rows_BT = np.full((len(values), max(map(len, values))), padding, values[0].dtype)
    for row, value in zip(rows_BT, values, strict=True):
        row[: len(value)] = value
    return rows_BT


def weightless() -> MicroBatch:
    """Two tokens without loss, so that a rank takes part in the collectives of the other ranks."""
    nothing_BT = np.zeros((1, 2), np.float32)
    return MicroBatch(
        token_ids_BT=np.full((1, 2), _PAD, np.int32),
        behaviour_logprobs_BT=nothing_BT,
        reference_logprobs_BT=nothing_BT,
        loss_mask_BT=np.zeros((1, 2), np.bool_),
        weight_versions_BT=np.zeros((1, 2), np.int64),
        lengths_B=np.array([2]),
        rollouts_B=np.zeros(1, np.int64),
        groups_B=np.zeros(1, np.int64),
        advantages_B=np.zeros(1, np.float64),
        weights_B=np.zeros(1, np.float64),
        bootstrap_B=np.zeros(1, np.bool_),
        temperatures_BT=np.ones((1, 2), np.float32),
        turn_rewards_BT=nothing_BT,
    )
