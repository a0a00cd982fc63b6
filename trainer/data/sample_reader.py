"""Leased samples as sequences, apart from the groups that cannot be trained.

Shape suffix: T tokens.
"""
# ruff: noqa: N803, N806 -- arrays carry shape suffixes

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import ConfigError
from services.lib.bounds import MAX_LOGPROB, MAX_REWARD, MIN_LOGPROB
from services.lib.routed_experts import RoutingShape
from trainer.config import AlgorithmConfig
from trainer.data.token_sequence import TokenSequence, sequence
from trainer.data.trained_reward import with_trained_reward

_GREATEST = float(np.finfo(np.float32).max)


@dataclass(slots=True)
class ReadSamples:
    """What became of leased samples."""

    sequences: list[TokenSequence] = field(default_factory=list)
    """Those of groups that can be trained."""
    rejected: dict[str, str] = field(default_factory=dict)
    """By group that cannot: why."""


class SampleReader:
    """Reads samples for one algorithm and model."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        vocabulary_size: int,
        routing: RoutingShape | str | None = None,
    ) -> None:
        """Read samples for a model.

        Args:
            algorithm: settings of the algorithm.
            vocabulary_size: rows of the model's embedding; token ids are below it.
            routing: how its routers choose, to replay recorded experts, or why they cannot be
                replayed; None: recorded experts are left out.
        """
        self._algorithm = algorithm
        self._vocabulary_size = vocabulary_size
        self._routing = routing

    def read(self, samples: Iterable[trajectory_pb2.Sample]) -> ReadSamples:
        """Read samples; one that cannot be trained rejects its group.

        Raises:
            ConfigError: the column that the algorithm needs is missing, or experts are recorded
                that the model cannot replay.
        """
        found = ReadSamples()
        for sample in samples:
            try:
                found.sequences.append(self._read(sample))
            except ValueError as error:
                found.rejected.setdefault(sample.group_id, str(error))
        found.sequences = _without(found.sequences, found.rejected)
        return found

    def _read(self, sample: trajectory_pb2.Sample) -> TokenSequence:
        routing = self._routing if sample.routed_experts else None
        if isinstance(routing, str):
            raise ConfigError(
                f"sample {sample.sample_id!r} has routed experts, which cannot be replayed: "
                f"{routing}; set batch.replay_routed_experts to false, or record_routed_experts of "
                "the rollout servers"
            )
        item = sequence(sample, self._algorithm.reference_column, routing)
        self._check(item)
        item = with_trained_reward(item, self._algorithm)
        _check_rewards(item, self._algorithm.trained_reward)
        return item

    def _check(self, item: TokenSequence) -> None:
        """Raises `ValueError` for values that the model or float32 does not survive."""
        greatest = int(item.token_ids_T.max(initial=0))
        if greatest >= self._vocabulary_size or item.token_ids_T.min(initial=0) < 0:
            raise ValueError(
                f"sample {item.sample_id!r} has token id {greatest}, the model's are 0 to "
                f"{self._vocabulary_size - 1}: check the model and engine that sampled it"
            )
        sampled_T = item.behaviour_logprobs_T[item.loss_mask_T]
        _check_range(item, "log-prob", sampled_T, MIN_LOGPROB)
        # A frozen model may find a token as improbable as float32 allows.
        frozen_T = item.reference_logprobs_T[item.loss_mask_T]
        _check_range(item, "reference log-prob", frozen_T, -_GREATEST)


def _check_range(
    item: TokenSequence, what: str, values_T: NDArray[np.float32], least: float
) -> None:
    bad_T = values_T[~((values_T >= least) & (values_T <= MAX_LOGPROB))]  # NaN is bad
    if len(bad_T):
        raise ValueError(
            f"sample {item.sample_id!r} has the {what} {bad_T[0]}, outside {least:g} to 0: check "
            "the engine or scorer that computed it"
        )


def _check_rewards(item: TokenSequence, name: str) -> None:
    values = [item.rewards[name], *(each.value for each in item.turn_rewards)]
    for value in values:
        if not abs(value) <= MAX_REWARD:  # NaN is not
            raise ValueError(
                f"rollout {item.rollout_id!r} has reward {name!r} {value}: training in float32 "
                f"needs finite rewards between ±{MAX_REWARD:g}"
            )


def _without(sequences: Sequence[TokenSequence], groups: Mapping[str, str]) -> list[TokenSequence]:
    return [item for item in sequences if item.group_id not in groups]
