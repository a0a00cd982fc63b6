"""Split the sequences of a step into micro-batches for the ranks.

Packed, a micro-batch is a budget of tokens, and sequences of a group stay adjacent so that a shared
prefix is computed once (`packing.py`). Padded, a micro-batch has rows of similar length.

Shape suffixes: N sequences of the step, B rows of a micro-batch, T tokens (padded on the right),
L layers, K chosen experts.
"""
# ruff: noqa: N806, N815 -- arrays carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.lib.transformer.token_rows import shared_tokens
from trainer.data.advantages import SequenceAdvantages
from trainer.data.row_cost import LINEAR, RowCost
from trainer.data.row_plan import PlannedRow, plan_packed, plan_padded
from trainer.data.token_sequence import TokenSequence

_PAD = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The rows of one forward and backward pass on one rank; tokens are as in `TokenSequence`."""

    token_ids_BT: NDArray[np.int32]
    """Vocabulary ids, padded on the right."""
    behaviour_logprobs_BT: NDArray[np.float32]
    reference_logprobs_BT: NDArray[np.float32]
    loss_mask_BT: NDArray[np.bool_]
    """False on padding."""
    weight_versions_BT: NDArray[np.int64]
    lengths_B: NDArray[np.int64]
    """Tokens of each row without padding."""
    rollouts_B: NDArray[np.int64]
    """Number of each row's rollout; for comparison only."""
    groups_B: NDArray[np.int64]
    """Number of each row's group."""
    sequences_B: NDArray[np.int64]
    """Number of each row's sequence in the step; -1: it is none of the step."""
    advantages_B: NDArray[np.float64]
    weights_B: NDArray[np.float64]
    """Weight of each trainable token of a row."""
    bootstrap_B: NDArray[np.bool_]
    temperatures_BT: NDArray[np.float32]
    """As in `TokenSequence`; 1 on padding."""
    turn_rewards_BT: NDArray[np.float32]
    """Reward of a turn at the last trainable token up to its end, or at its end if none is."""
    routed_experts_BTLK: NDArray[Any] | None = None
    """As in `TokenSequence`; the greatest number of its type where none is recorded. None: no row
    has any."""


def plan_micro_batches(
    sequences: Sequence[TokenSequence],
    advantages: SequenceAdvantages,
    *,
    num_ranks: int,
    micro_batch_tokens: int,
    packed: bool = True,
    whole_groups: bool = False,
    at_least: int = 1,
    cost: RowCost = LINEAR,
    numbers: Sequence[int] | None = None,
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Split a step into micro-batches, the same number for every rank.

    Micro-batches of the same number cost about the same on every rank (`row_plan.py`); those of a
    rank are in order of their cost, costliest first. Sequences without a trainable token are
    dropped; a rank with fewer micro-batches gets some of zero weight. A sequence (or group) that
    exceeds the budget has a separate micro-batch. The same sequences give the same plan.

    Args:
        sequences: of the step, or of a gradient chunk.
        advantages: of the same sequences.
        micro_batch_tokens: budget of a micro-batch, padding included.
        whole_groups: never split a group.
        at_least: micro-batches of a rank, if it has as many sequences and computes without padding.
        cost: of rows in the model.
        numbers: of the sequences in the step; None: in order from 0.

    Returns:
        The micro-batches of each rank.
    """
    numbering = _Numbering(sequences, range(len(sequences)) if numbers is None else numbers)
    plan = (plan_packed if packed else plan_padded)(
        _planned(sequences, numbering, packed),
        cost,
        num_ranks=num_ranks,
        budget=micro_batch_tokens,
        whole_groups=whole_groups,
        at_least=at_least,
    )
    most = max(map(len, plan))
    return tuple(
        tuple(_stack(sequences, advantages, numbering, rows) for rows in share)
        + (weightless(),) * (most - len(share))
        for share in plan
    )


class _Numbering:
    """Numbers of rollouts and groups, in order of first occurrence, and those of sequences."""

    def __init__(self, sequences: Sequence[TokenSequence], numbers: Sequence[int]) -> None:
        self.sequences_N = np.array(numbers, np.int64)
        self.rollouts_N = _numbered([item.rollout_id for item in sequences])
        self.groups_N = _numbered([item.group_id for item in sequences])


def _numbered(names: Sequence[str]) -> NDArray[np.int64]:
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return np.array([places[name] for name in names], np.int64)


def _planned(
    sequences: Sequence[TokenSequence], numbering: _Numbering, packed: bool
) -> list[PlannedRow]:
    """Rows with a token, groups one after the other, members in lexicographic order."""
    ids = [item.token_ids_T for item in sequences]
    rows = [row for row in range(len(ids)) if len(ids[row])]
    rows.sort(key=lambda row: (numbering.groups_N[row], ids[row].tolist()))
    shared = [shared_tokens(ids[a], ids[b]) if packed else 0 for a, b in pairwise(rows)]
    return [
        PlannedRow(
            number=row,
            group=int(numbering.groups_N[row]),
            length=len(ids[row]),
            outputs=int(sequences[row].loss_mask_T.sum()),
            shared=common,
        )
        for row, common in zip(rows, [0, *shared], strict=False)
    ]


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
        sequences_B=numbering.sequences_N[kept],
        advantages_B=advantages.advantages_N[kept],
        weights_B=advantages.weights_N[kept],
        bootstrap_B=advantages.bootstrap_N[kept],
        temperatures_BT=_padded([member.temperatures_T for member in members], 1),
        turn_rewards_BT=_padded(
            [_turn_rewards(sequences[row], advantages.turn_rewards_N[row]) for row in rows]
        ),
        routed_experts_BTLK=_routed_experts(members),
    )


def _routed_experts(members: Sequence[TokenSequence]) -> NDArray[Any] | None:
    records = [member.routed_experts_TLK for member in members]
    like = next((record for record in records if record is not None), None)
    if like is None:
        return None
    shape = (len(members), max(len(member.token_ids_T) for member in members), *like.shape[1:])
    experts_BTLK = np.full(shape, np.iinfo(like.dtype).max, like.dtype)
    for row_TLK, record in zip(experts_BTLK, records, strict=True):
        if record is not None:
            row_TLK[: len(record)] = record
    return experts_BTLK


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
        sequences_B=np.full(1, -1, np.int64),
        advantages_B=np.zeros(1, np.float64),
        weights_B=np.zeros(1, np.float64),
        bootstrap_B=np.zeros(1, np.bool_),
        temperatures_BT=np.ones((1, 2), np.float32),
        turn_rewards_BT=nothing_BT,
    )
