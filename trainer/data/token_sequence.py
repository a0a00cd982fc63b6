"""Leased samples as numpy arrays.

Shape suffixes: T tokens, L layers, K chosen experts.
"""
# ruff: noqa: N815 -- arrays carry shape suffixes

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import ConfigError
from services.lib.bounds import MIN_TEMPERATURE
from services.lib.routed_experts import RoutingShape, read_records

_VALUE_BYTES = 4


class TurnReward(NamedTuple):
    """A reward of one turn."""

    name: str
    value: float
    end: int
    """Tokens of the sequence up to the end of the turn."""
    turn_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One sample as arrays of equal length, cut after its last trainable token."""

    sample_id: str
    """Id in the step ledger."""
    rollout_id: str
    """Its rollout; a rollout with a rewritten history has several sequences."""
    group_id: str
    """Group whose rewards are compared."""
    token_ids_T: NDArray[np.int32]
    behaviour_logprobs_T: NDArray[np.float32]
    """Log-probs recorded at sampling, after temperature; 0 for environment tokens."""
    reference_logprobs_T: NDArray[np.float32]
    """Log-probs under a frozen model; 0 if the trainer has no reference column."""
    loss_mask_T: NDArray[np.bool_]
    """True for trainable tokens."""
    weight_versions_T: NDArray[np.int64]
    """Weight version each token was sampled with; 0 for environment tokens."""
    temperatures_T: NDArray[np.float32]
    rewards: Mapping[str, float]
    """By name, those of the rollout plus those of the sequence's turns; and the sample's columns of
    one value."""
    turn_rewards: Sequence[TurnReward] = ()
    """Those of the turns alone, in order."""
    own_rewards: frozenset[str] = frozenset()
    """Names of rewards that are of this sequence alone: the sample's columns."""
    truncated: bool = False
    """True if it ends where a limit cut its rollout off."""
    rollout_truncated: bool = False
    """True if a limit cut its rollout off, here or in a turn that is not trained."""
    cut: bool = False
    """True if a limit cut off its rollout, or the answer of one of its turns."""
    replayed: bool = False
    """True if an earlier step trained on it (replay)."""
    traceparent: str = ""
    """Trace context that its rollout began under; empty: unknown."""
    routed_experts_TLK: NDArray[Any] | None = None
    """Experts that the engine chose in the pass that gave each token (`routed_experts.py`); None:
    none are recorded, or replayed."""


def sequence(
    sample: trajectory_pb2.Sample, reference_column: str = "", routing: RoutingShape | None = None
) -> TokenSequence:
    """Convert a leased sample into arrays; tokens of unknown weight version are not trainable.

    Args:
        sample: as leased.
        reference_column: column with log-probs under a frozen model; empty if there is none.
        routing: of the model, to read recorded experts; None: they are left out.

    Raises:
        ValueError: parallel fields differ in length, a temperature is too low, or recorded experts
            are not the model's.
        ConfigError: the column is missing.
    """
    arrays = _arrays(sample)
    _check(sample, arrays)
    mask = arrays.loss_mask_T & _trusted(arrays.spans)
    mask[:1] = False  # nothing predicts the first token
    length = int(mask.nonzero()[0][-1]) + 1 if mask.any() else 0
    # A store of the release before does not say it of rollouts.
    is_cut_off = sample.rollout_truncated or sample.truncated
    return TokenSequence(
        sample_id=sample.sample_id,
        rollout_id=sample.rollout_id,
        group_id=sample.group_id,
        token_ids_T=arrays.token_ids_T[:length],
        behaviour_logprobs_T=arrays.logprobs_T[:length],
        reference_logprobs_T=_reference(sample, reference_column, len(mask))[:length],
        loss_mask_T=mask[:length],
        weight_versions_T=_versions(arrays.spans)[:length],
        temperatures_T=_temperatures(sample)[:length],
        rewards=_rewards(sample),
        turn_rewards=tuple(_turn_rewards(sample)),
        own_rewards=frozenset(_number_columns(sample)),
        truncated=sample.truncated and length == len(mask),
        rollout_truncated=is_cut_off,
        cut=is_cut_off or any(_is_cut(turn) for turn in sample.turns),
        replayed=sample.replayed,
        traceparent=sample.traceparent,
        routed_experts_TLK=_routed_experts(sample, routing, len(mask), length),
    )


def without_truncated(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """The same sequences, without a token where a limit cut their rollouts off (DAPO 3.4)."""
    return [_emptied(item) if item.rollout_truncated else item for item in sequences]


def _emptied(item: TokenSequence) -> TokenSequence:
    arrays = {
        each.name: getattr(item, each.name)[:0] for each in fields(item) if each.name[-2:] == "_T"
    }
    return replace(item, routed_experts_TLK=None, **arrays)


def trainable_tokens(sequences: Sequence[TokenSequence]) -> int:
    return sum(int(item.loss_mask_T.sum()) for item in sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrays:
    """The parallel fields of a sample, unchecked."""

    token_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    loss_mask_T: NDArray[np.bool_]
    spans: Sequence[tokens_pb2.Span]


def _arrays(sample: trajectory_pb2.Sample) -> _Arrays:
    packed = sample.tokens
    return _Arrays(
        token_ids_T=_unpacked(sample, "tokens.token_ids", packed.token_ids, "<i4"),
        logprobs_T=_unpacked(sample, "tokens.logprobs", packed.logprobs, "<f4"),
        loss_mask_T=np.frombuffer(sample.loss_mask, np.uint8) != 0,
        spans=packed.spans,
    )


def _unpacked(sample: trajectory_pb2.Sample, name: str, data: bytes, dtype: str) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise ValueError(
            f"sample {sample.sample_id!r}: {name} has {len(data)} bytes, "
            "which is not a multiple of 4"
        )
    return np.frombuffer(data, dtype)


def _reference(sample: trajectory_pb2.Sample, column: str, length: int) -> NDArray[np.float32]:
    if not column:
        return np.zeros(length, np.float32)
    found = {entry.name: entry.values for entry in sample.columns}
    if column not in found:
        raise ConfigError(
            f"sample {sample.sample_id!r} has no column {column!r} but {sorted(found)}: add it to "
            "the run's required_columns, and start a scoring service that writes it"
        )
    values = _unpacked(sample, f"column {column!r}", found[column], "<f4")
    if len(values) != length:
        raise ValueError(
            f"sample {sample.sample_id!r}: column {column!r} has {len(values)} values for {length} "
            "tokens: it must have a log-prob for each token"
        )
    return values


def _routed_experts(
    sample: trajectory_pb2.Sample, routing: RoutingShape | None, num_tokens: int, kept: int
) -> NDArray[Any] | None:
    if routing is None or not sample.routed_experts:
        return None
    try:
        return read_records(sample.routed_experts, routing, num_tokens)[:kept]
    except ValueError as error:
        raise ValueError(f"sample {sample.sample_id!r}: {error}") from None


def _check(sample: trajectory_pb2.Sample, arrays: _Arrays) -> None:
    length = len(arrays.token_ids_T)
    sizes = {
        "logprobs": len(arrays.logprobs_T),
        "loss_mask": len(arrays.loss_mask_T),
        "spans": sum(span.num_tokens for span in arrays.spans),
        "turns": sum(turn.num_tokens for turn in sample.turns),
    }
    for name, size in sizes.items():
        if size != length:
            raise ValueError(
                f"sample {sample.sample_id!r}: {name} covers {size} tokens, token_ids {length}"
            )
    for turn in sample.turns:
        if not temperature(turn) >= MIN_TEMPERATURE:
            raise ValueError(
                f"sample {sample.sample_id!r}: temperature of turn {turn.turn_id!r} is "
                f"{temperature(turn)}, greedy turns cannot be trained on: sample with at least "
                f"{MIN_TEMPERATURE:g}, or leave the turn out of training"
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


def temperature(turn: trajectory_pb2.SampleTurn) -> float:
    return turn.sampling.temperature if turn.sampling.HasField("temperature") else 1.0


def _is_cut(turn: trajectory_pb2.SampleTurn) -> bool:
    return turn.finish_reason == tokens_pb2.FINISH_REASON_LENGTH


def _temperatures(sample: trajectory_pb2.Sample) -> NDArray[np.float32]:
    values = np.array([temperature(turn) for turn in sample.turns], np.float32)
    return np.repeat(values, [turn.num_tokens for turn in sample.turns])


def _turn_rewards(sample: trajectory_pb2.Sample) -> Iterator[TurnReward]:
    end = 0
    for turn in sample.turns:
        end += turn.num_tokens
        for reward in turn.rewards:
            yield TurnReward(reward.name, reward.value, end, turn.turn_id)


def _number_columns(sample: trajectory_pb2.Sample) -> dict[str, float]:
    return {
        column.name: float(np.frombuffer(column.values, "<f4")[0])
        for column in sample.columns
        if len(column.values) == _VALUE_BYTES
    }


def _rewards(sample: trajectory_pb2.Sample) -> dict[str, float]:
    """Rewards of agents, summed by name, plus the columns of one value."""
    rewards = _number_columns(sample)
    of_turns = (reward for turn in sample.turns for reward in turn.rewards)
    for reward in (*sample.rewards, *of_turns):
        rewards[reward.name] = rewards.get(reward.name, 0.0) + reward.value
    return rewards
