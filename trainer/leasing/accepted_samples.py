"""Leased samples that can be trained; the trajectory manager replaces the groups of the others."""
# ruff: noqa: N803, N806 -- arrays carry shape suffixes

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis import metrics
from services.chassis.errors import ConfigError
from services.lib.bounds import MAX_LOGPROB, MAX_REWARD, MIN_LOGPROB
from services.lib.routed_experts import RoutingShape
from trainer.clients.sample_client import SampleClient
from trainer.config import AlgorithmConfig, TrainerConfig
from trainer.data.gradient_chunks import GroupChunker
from trainer.data.token_sequence import TokenSequence, sequence
from trainer.tracking.tracker import Alarms

_MAX_REJECTED_GROUPS = 64
"""A group that cannot be trained is replaced; after more than this many in a row the trainer
ends, since all agents err."""


class AcceptedSamples:
    """Checks what a step has leased before any rank gets it.

    Args:
        alarms: get a line for each rejected group.
        vocabulary_size: token ids of the model are below it.
        routing: how its routers choose, or why they cannot replay recorded experts.
    """

    def __init__(
        self,
        config: TrainerConfig,
        samples: SampleClient,
        alarms: Alarms,
        vocabulary_size: int,
        routing: RoutingShape | str,
    ) -> None:
        self._samples, self._alarms = samples, alarms
        replayed = routing if config.batch.replay_routed_experts else None
        self._reader = SampleReader(config.algorithm, vocabulary_size, replayed)
        self._num_in_a_row = 0
        self.named_rewards: Mapping[str, Collection[str]] = {}
        """Names of rewards in settings, by setting; empty once rollouts have shown theirs."""
        self._rejections = metrics.counter(
            "trainer", "rejected_groups_total", "Groups that could not be trained"
        )

    async def read(
        self,
        step: int,
        leased: sample_pb2.LeaseSamplesResponse,
        chunker: GroupChunker | None = None,
    ) -> list[TokenSequence] | None:
        """The sequences of a page of `step`; None: groups were rejected, lease the page again.

        Args:
            step: leased under this trainer's epoch.
            leased: a page of it, or all.
            chunker: has the earlier samples of a streamed step; forgets those of rejected groups.

        Raises:
            ConfigError: too many groups in a row cannot be trained.
        """
        found = self._reader.read(leased.samples)
        if found.sequences:
            self._num_in_a_row = 0
            self._check_names(leased.samples)
        if not found.rejected:
            return found.sequences
        await self.reject(step, found.rejected)
        if chunker is not None:
            chunker.drop(found.rejected)
        return None

    def _check_names(self, samples: Iterable[trajectory_pb2.Sample]) -> None:
        named, self.named_rewards = self.named_rewards, {}
        if named:
            found = {reward.name for sample in samples for reward in sample.rewards}
            if text := unknown_rewards(named, found):
                self._alarms.add(text)

    async def reject(self, step: int, messages: Mapping[str, str]) -> None:
        """Let the manager replace groups; `messages` by group say why. Raises as `read`."""
        self._num_in_a_row += len(messages)
        group_id, message = next(iter(messages.items()))
        if self._num_in_a_row > _MAX_REJECTED_GROUPS:
            raise ConfigError(
                f"{self._num_in_a_row} groups in a row cannot be trained, the last one because "
                f"{message}"
            )
        await self._samples.reject(step, messages)
        for group_id, message in messages.items():
            self._rejections.inc()
            self._alarms.add(
                f"group {group_id!r} of step {step} cannot be trained and was replaced: {message}"
            )


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


def with_trained_reward(item: TokenSequence, algorithm: AlgorithmConfig) -> TokenSequence:
    """The sequence with the trained reward, and that of each turn, as `algorithm.trained_reward`.

    With `reward_weights`, the weighted sum of those that it has. Otherwise the reward of the name
    given; where none is given, "reward", or the only one there is.

    Raises:
        ValueError: it has no reward to train on; names the rollout, its rewards and the cure.
    """
    weights = algorithm.reward_weights or {_name(item, algorithm): 1.0}
    if not weights.keys() & item.rewards.keys():
        raise ValueError(_missing(item, weights))
    trained = algorithm.trained_reward
    value = sum(weight * item.rewards.get(name, 0.0) for name, weight in weights.items())
    is_own = not weights.keys().isdisjoint(item.own_rewards)
    return replace(
        item,
        own_rewards=item.own_rewards | {trained} if is_own else item.own_rewards - {trained},
        rewards={**item.rewards, trained: value},
        turn_rewards=tuple(
            each._replace(name=trained, value=weights[each.name] * each.value)
            for each in item.turn_rewards
            if each.name in weights
        ),
    )


def _name(item: TokenSequence, algorithm: AlgorithmConfig) -> str:
    name = algorithm.trained_reward
    if not algorithm.reward and name not in item.rewards and len(item.rewards) == 1:
        return next(iter(item.rewards))
    return name


def _missing(item: TokenSequence, weights: Mapping[str, float]) -> str:
    wanted, found = ", ".join(map(repr, weights)), sorted(item.rewards)
    return (
        f"rollout {item.rollout_id!r} of task {item.group_id!r} has no reward {wanted} but "
        f"{found}: set algorithm.reward or algorithm.reward_weights to what it has, or finish "
        "rollouts with that reward"
    )


def unknown_rewards(named: Mapping[str, Collection[str]], found: Collection[str]) -> str:
    """What to tell of settings that name rewards which no rollout so far has; empty: nothing.

    Args:
        named: by setting, the names in it.
        found: all names of rewards that rollouts have.
    """
    lines = [
        f"{setting} names {name!r}" + _near(name, found)
        for setting, names in named.items()
        for name in sorted({*names} - {"", *found})
    ]
    shown = ", ".join(map(repr, sorted(found)))
    return f"the first rollouts have the rewards {shown}, and {'; '.join(lines)}" if lines else ""


def _near(name: str, found: Collection[str]) -> str:
    near = difflib.get_close_matches(name, found, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
