"""Samples as arrays, and how a step's samples are cut into micro-batches for the ranks.

Shape suffixes: N sequences of the step, B rows of a micro-batch, T tokens (padded on the right).
"""
# ruff: noqa: N803, N815 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

__all__ = ["MicroBatch", "TokenSequence", "plan", "sequence", "trainable_tokens"]

_PAD = 0
_VALUE_BYTES = 4
_PASS_TOKENS = 128
"""What a forward and backward pass costs whatever its size, counted in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One sample as arrays of equal length, cut after its last trainable token."""

    sample_id: str
    """Name in the manager's ledger."""
    rollout_id: str
    """Rollout it is part of; a rollout with a rewritten history gives several sequences."""
    group_id: str
    """Group whose rewards are compared."""
    token_ids_T: NDArray[np.int32]
    """Vocabulary ids."""
    behaviour_logprobs_T: NDArray[np.float32]
    """Log-probs recorded at sampling, after temperature; 0 for environment tokens."""
    reference_logprobs_T: NDArray[np.float32]
    """Log-probs under a frozen model; 0 if none is asked for."""
    loss_mask_T: NDArray[np.bool_]
    """True where the loss counts."""
    weight_versions_T: NDArray[np.int64]
    """Weights each token was sampled under; 0 for environment tokens."""
    temperature: float
    """Temperature it was sampled with."""
    rewards: Mapping[str, float]
    """Sum of the rollout's rewards by name, and the sample's columns of one value."""
    replayed: bool = False
    """True when it was trained before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that one rank computes in one forward pass."""

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
    advantages_B: NDArray[np.float64]
    """Advantage of each row's rollout."""
    weights_B: NDArray[np.float64]
    """Weight of each trainable token of a row."""
    temperatures_B: NDArray[np.float32]
    """Temperature of each row."""


def sequence(sample: trajectory_pb2.Sample, reference_column: str = "") -> TokenSequence:
    """Turn a leased sample into arrays; tokens of unknown weight version are never trained.

    Args:
        sample: as it was leased.
        reference_column: its log-probs under a frozen model; empty: none are wanted.

    Raises:
        ValueError: parallel fields differ in length, the temperature is not positive, or the
            column is not there.
    """
    arrays = _arrays(sample)
    _check(sample, arrays)
    mask = arrays.loss_mask_T & _trusted(arrays.spans)
    mask[:1] = False  # nothing predicts the first token
    length = int(mask.nonzero()[0][-1]) + 1 if mask.any() else 0
    return TokenSequence(
        sample_id=sample.sample_id,
        rollout_id=sample.rollout_id,
        group_id=sample.group_id,
        token_ids_T=arrays.token_ids_T[:length],
        behaviour_logprobs_T=arrays.logprobs_T[:length],
        reference_logprobs_T=_reference(sample, reference_column, len(mask))[:length],
        loss_mask_T=mask[:length],
        weight_versions_T=_versions(arrays.spans)[:length],
        temperature=sample.temperature,
        rewards=_rewards(sample),
        replayed=sample.replayed,
    )


def trainable_tokens(sequences: Sequence[TokenSequence]) -> int:
    """Tokens whose loss counts: what the step's loss is divided by."""
    return sum(int(item.loss_mask_T.sum()) for item in sequences)


def plan(
    sequences: Sequence[TokenSequence],
    advantages_N: NDArray[np.float64],
    weights_N: NDArray[np.float64],
    *,
    num_ranks: int,
    micro_batch_tokens: int,
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Cut a step into micro-batches, the same number for every rank.

    Rows of similar length share a micro-batch, so little is padding; lengths are dealt to the ranks
    back and forth, so all finish at about the same time. Sequences without a trainable token cost
    nothing; a rank with fewer micro-batches gets ones without weight. A sequence longer than
    `micro_batch_tokens` has a micro-batch of its own.
    """
    lengths = [len(item.token_ids_T) for item in sequences]
    order = sorted((n for n in range(len(lengths)) if lengths[n]), key=lambda n: (-lengths[n], n))
    shares = [
        _cut(_dealt(order, rank, num_ranks), lengths, micro_batch_tokens)
        for rank in range(num_ranks)
    ]
    most = max(map(len, shares))
    return tuple(
        tuple(_stack(sequences, advantages_N, weights_N, rows) for rows in share)
        + (_weightless(),) * (most - len(share))
        for share in shares
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrays:
    """The parallel fields of a sample, packed or not; nothing is checked yet."""

    token_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    loss_mask_T: NDArray[np.bool_]
    spans: Sequence[tokens_pb2.Span]


def _arrays(sample: trajectory_pb2.Sample) -> _Arrays:
    if not sample.HasField("packed_tokens"):
        return _Arrays(
            token_ids_T=np.asarray(sample.tokens.token_ids, np.int32),
            logprobs_T=np.asarray(sample.tokens.logprobs, np.float32),
            loss_mask_T=np.asarray(sample.loss_mask, np.bool_),
            spans=sample.tokens.spans,
        )
    packed = sample.packed_tokens
    return _Arrays(
        token_ids_T=_unpacked(sample, "packed_tokens.token_ids", packed.token_ids, "<i4"),
        logprobs_T=_unpacked(sample, "packed_tokens.logprobs", packed.logprobs, "<f4"),
        loss_mask_T=np.frombuffer(sample.packed_loss_mask, np.uint8) != 0,
        spans=packed.spans,
    )


def _unpacked(sample: trajectory_pb2.Sample, name: str, data: bytes, dtype: str) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise ValueError(
            f"sample {sample.sample_id!r}: {name} has {len(data)} bytes, "
            "which is no whole number of values of 4 bytes"
        )
    return np.frombuffer(data, dtype)


def _reference(sample: trajectory_pb2.Sample, column: str, length: int) -> NDArray[np.float32]:
    if not column:
        return np.zeros(length, np.float32)
    found = {entry.name: entry.values for entry in sample.columns}
    if column not in found:
        raise ValueError(
            f"sample {sample.sample_id!r} has no column {column!r} but {sorted(found)}: put it "
            "into the run's required_columns, and start a scoring service that writes it"
        )
    values = _unpacked(sample, f"column {column!r}", found[column], "<f4")
    if len(values) != length:
        raise ValueError(
            f"sample {sample.sample_id!r}: column {column!r} has {len(values)} values for {length} "
            "tokens: log-probs are one for each token"
        )
    return values


def _check(sample: trajectory_pb2.Sample, arrays: _Arrays) -> None:
    length = len(arrays.token_ids_T)
    sizes = {
        "logprobs": len(arrays.logprobs_T),
        "loss_mask": len(arrays.loss_mask_T),
        "spans": sum(span.num_tokens for span in arrays.spans),
    }
    for name, size in sizes.items():
        if size != length:
            raise ValueError(
                f"sample {sample.sample_id!r}: {name} covers {size} tokens, token_ids {length}"
            )
    if not sample.temperature > 0:
        raise ValueError(
            f"sample {sample.sample_id!r}: temperature is {sample.temperature}, "
            "greedy rollouts cannot be trained on: sample with a temperature above 0"
        )


def _trusted(spans: Sequence[tokens_pb2.Span]) -> NDArray[np.bool_]:
    trusted = [
        span.origin == tokens_pb2.ORIGIN_POLICY
        and span.version_source != tokens_pb2.VERSION_SOURCE_UNSPECIFIED
        for span in spans
    ]
    return np.repeat(np.array(trusted, np.bool_), [span.num_tokens for span in spans])


def _versions(spans: Sequence[tokens_pb2.Span]) -> NDArray[np.int64]:
    versions = np.array([span.weight_version for span in spans], np.int64)
    return np.repeat(versions, [span.num_tokens for span in spans])


def _rewards(sample: trajectory_pb2.Sample) -> dict[str, float]:
    """What agents gave, added up by name, and columns of one value: what a service found."""
    rewards: dict[str, float] = {}
    for column in sample.columns:
        if len(column.values) == _VALUE_BYTES:
            rewards[column.name] = float(np.frombuffer(column.values, "<f4")[0])
    for reward in sample.rewards:
        rewards[reward.name] = rewards.get(reward.name, 0.0) + reward.value
    return rewards


def _dealt(order: Sequence[int], rank: int, num_ranks: int) -> list[int]:
    """The rank's share when cards go round the table forth and back."""
    rounds = [order[start : start + num_ranks] for start in range(0, len(order), num_ranks)]
    seats = [rank if number % 2 == 0 else num_ranks - 1 - rank for number in range(len(rounds))]
    return [cards[seat] for cards, seat in zip(rounds, seats, strict=True) if seat < len(cards)]


def _cut(rows: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """The cheapest cut of `rows` (longest first) into runs of at most `budget` padded tokens.

    Dynamic programming over the end of the last run; a run costs its padded tokens and a constant.
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
    advantages_N: NDArray[np.float64],
    weights_N: NDArray[np.float64],
    rows: Sequence[int],
) -> MicroBatch:
    members = [sequences[row] for row in rows]
    shape = (len(members), max(len(member.token_ids_T) for member in members))
    batch = MicroBatch(
        token_ids_BT=np.full(shape, _PAD, np.int32),
        behaviour_logprobs_BT=np.zeros(shape, np.float32),
        reference_logprobs_BT=np.zeros(shape, np.float32),
        loss_mask_BT=np.zeros(shape, np.bool_),
        weight_versions_BT=np.zeros(shape, np.int64),
        advantages_B=advantages_N[list(rows)],
        weights_B=weights_N[list(rows)],
        temperatures_B=np.array([member.temperature for member in members], np.float32),
    )
    for row, member in enumerate(members):
        length = len(member.token_ids_T)
        batch.token_ids_BT[row, :length] = member.token_ids_T
        batch.behaviour_logprobs_BT[row, :length] = member.behaviour_logprobs_T
        batch.reference_logprobs_BT[row, :length] = member.reference_logprobs_T
        batch.loss_mask_BT[row, :length] = member.loss_mask_T
        batch.weight_versions_BT[row, :length] = member.weight_versions_T
    return batch


def _weightless() -> MicroBatch:
    """Two tokens without loss: keeps a rank in step with the collectives of the others."""
    return MicroBatch(
        token_ids_BT=np.full((1, 2), _PAD, np.int32),
        behaviour_logprobs_BT=np.zeros((1, 2), np.float32),
        reference_logprobs_BT=np.zeros((1, 2), np.float32),
        loss_mask_BT=np.zeros((1, 2), np.bool_),
        weight_versions_BT=np.zeros((1, 2), np.int64),
        advantages_B=np.zeros(1, np.float64),
        weights_B=np.zeros(1, np.float64),
        temperatures_B=np.ones(1, np.float32),
    )
