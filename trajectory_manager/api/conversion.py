"""Conversion between protobuf messages and the model; no logic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from seamflow.common.v1 import tokens_pb2
from seamflow.durations import to_timestamp
from seamflow.trajectory.v1 import task_service_pb2, trajectory_pb2, trajectory_service_pb2

from services.chassis.errors import invalid_argument
from services.chassis.log import get_logger
from services.chassis.rpc import fields
from trajectory_manager.api import validation
from trajectory_manager.model import prefix_tree, sampling
from trajectory_manager.model.records import (
    DeadLetter,
    FailureClass,
    Outcome,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Task,
)
from trajectory_manager.model.runs import RunConfig
from trajectory_manager.model.tokens import (
    Origin,
    RolloutFinish,
    Span,
    Tokens,
    Turn,
    VersionSource,
)
from trajectory_manager.service import sample_builder

_LOG = get_logger()
_MAX_SAMPLES = 4096
_MAX_REWARDS = 1024
_MAX_UNTRAINED = 4096
_MAX_ROUTED_BYTES = 32 << 20
"""Of a sample, which is one message: routed experts of later tokens are left out."""
_FAILURES = (
    tokens_pb2.FAILURE_CLASS_ENVIRONMENT,
    tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
    tokens_pb2.FAILURE_CLASS_TIMEOUT,
    tokens_pb2.FAILURE_CLASS_CANCELLED,
)


def tokens_from(field: str, message: tokens_pb2.Tokens) -> Tokens:
    """Validated tokens of a turn, which equal packed ones on the wire."""
    packed = tokens_pb2.PackedTokens.FromString(message.SerializeToString())
    validation.packed_tokens(field, packed)
    spans = (
        Span(
            s.num_tokens,
            Origin(s.origin),
            s.weight_version,
            VersionSource(s.version_source),
            s.server_id,
        )
        for s in packed.spans
    )
    return Tokens(packed.token_ids, packed.logprobs, tuple(spans))


def purpose_from(field: str, value: int) -> Purpose:
    if value not in set(Purpose):
        raise invalid_argument(field, value, "TRAIN or EVAL")
    return Purpose(value)


def task_from(
    field: str, message: trajectory_pb2.Task, config: RunConfig, *, own: bool = False
) -> Task:
    """A validated task; its number of samples defaults to the run's group size, 1 for EVAL."""
    purpose = purpose_from(f"{field}.purpose", message.purpose)
    default = config.group_size if purpose is Purpose.TRAIN else 1
    number = validation.bounded(f"{field}.num_samples", message.num_samples, _MAX_SAMPLES)
    return Task(
        task_id=validation.name(f"{field}.task_id", message.task_id),
        payload_json=validation.json_object(f"{field}.payload_json", message.payload_json),
        num_samples=number or default,
        purpose=purpose,
        labels=validation.labels(f"{field}.labels", message.labels),
        own=own,
        pinned_weight_version=pinned_from(f"{field}.pinned_weight_version", message),
    )


def pinned_from(
    field: str, message: trajectory_pb2.Task | trajectory_service_pb2.NewRollout
) -> int | None:
    """The version that an EVAL task or rollout is pinned to; None if there is none."""
    if not message.HasField("pinned_weight_version"):
        return None
    version = message.pinned_weight_version
    if message.purpose != int(Purpose.EVAL):
        raise invalid_argument(field, version, "only for purpose EVAL")
    return fields.not_negative(field, version)


def task_to(task: Task) -> trajectory_pb2.Task:
    return fields.message_of(trajectory_pb2.Task, task, labels=dict(task.labels))


def dead_letter_to(letter: DeadLetter) -> task_service_pb2.DeadLetter:
    return fields.message_of(
        task_service_pb2.DeadLetter,
        letter,
        task=task_to(letter.task),
        discard_time=to_timestamp(letter.time),
        rollout_ids=letter.rollout_ids,
    )


def rewards_from(field: str, message: tokens_pb2.Rewards) -> Outcome:
    """The validated outcome of a rollout that counts: names are unique per turn, values finite."""
    validation.bounded(f"{field}.rewards", len(message.rewards), _MAX_REWARDS)
    rewards = tuple(
        _reward_from(f"{field}.rewards[{i}]", reward) for i, reward in enumerate(message.rewards)
    )
    if len({(reward.name, reward.turn_id) for reward in rewards}) < len(rewards):
        names = [reward.name for reward in rewards]
        raise invalid_argument(f"{field}.rewards", names, "each name once per turn")
    for name, total in Outcome(rewards=rewards).totals.items():
        validation.reward(f"{field}.rewards (the sum of {name!r})", total)
    failure = validation.text(f"{field}.policy_failure", message.policy_failure)
    return Outcome(
        rewards=rewards,
        failure_class=FailureClass.POLICY if failure else FailureClass.NONE,
        failure_message=failure,
        truncated=message.truncated,
    )


def _reward_from(field: str, reward: tokens_pb2.Reward) -> Reward:
    return Reward(
        name=validation.name(f"{field}.name", reward.name),
        value=validation.reward(f"{field}.value", reward.value),
        turn_id=validation.optional_name(f"{field}.turn_id", reward.turn_id),
    )


def _failure_from(message: tokens_pb2.Failure) -> Outcome:
    if message.failure_class not in _FAILURES:
        cure = (
            "ENVIRONMENT, INFRASTRUCTURE, TIMEOUT or CANCELLED; what the policy did wrong is "
            "reported with its rewards, as rewards.policy_failure"
        )
        raise invalid_argument("failure.failure_class", message.failure_class, cure)
    return Outcome(
        failure_class=FailureClass(message.failure_class),
        failure_message=validation.text("failure.message", message.message),
    )


def rollout_finish_from(
    message: trajectory_service_pb2.RolloutFinish,
) -> tuple[str, RolloutFinish]:
    """The run and the validated finish of a rollout."""
    finish = RolloutFinish(
        rollout_id=validation.name("rollout_id", message.rollout_id),
        credential_digest=validation.digest("credential_digest", message.credential_digest),
        outcome=_finish_outcome(message),
    )
    return validation.run_name(message.run_id), finish


def _finish_outcome(message: trajectory_service_pb2.RolloutFinish) -> Outcome:
    """The outcome with the turns that are not trained; absent: without rewards."""
    failed = message.HasField("failure")
    outcome = _failure_from(message.failure) if failed else rewards_from("rewards", message.rewards)
    untrained = message.untrained_turn_ids
    validation.bounded("untrained_turn_ids", len(untrained), _MAX_UNTRAINED)
    names = (validation.name(f"untrained_turn_ids[{i}]", name) for i, name in enumerate(untrained))
    return replace(outcome, untrained_turn_ids=tuple(names))


def trajectory_to(
    rollout: Rollout, turns: Sequence[Turn], *, with_spans: bool = False
) -> trajectory_pb2.Trajectory:
    """The message of a rollout.

    Turns of which only spans were read have no tokens, or with `with_spans` these spans.
    """
    outcome = rollout.outcome
    message_keys = prefix_tree.message_keys(turns)
    return fields.message_of(
        trajectory_pb2.Trajectory,
        rollout,
        turns=[
            _turn_to(
                turn,
                turn.tokens if turn.tokens.ids or with_spans else None,
                message_keys[turn.turn_id],
            )
            for turn in turns
        ],
        rewards=_rewards_to(outcome) if rollout.state is RolloutState.FINISHED else None,
        failure=_failure_to(outcome) if rollout.state is RolloutState.FAILED else None,
        untrained_turn_ids=outcome.untrained_turn_ids,
        create_time=to_timestamp(rollout.create_time),
        finish_time=to_timestamp(rollout.finish_time) if rollout.finish_time else None,
        labels=dict(rollout.labels),
    )


def _rewards_to(outcome: Outcome) -> tokens_pb2.Rewards:
    return tokens_pb2.Rewards(
        rewards=(reward.message() for reward in outcome.rewards),
        policy_failure=outcome.failure_message,
        truncated=outcome.truncated,
    )


def _failure_to(outcome: Outcome) -> tokens_pb2.Failure:
    return tokens_pb2.Failure(
        failure_class=int(outcome.failure_class),  # type: ignore[arg-type]
        message=outcome.failure_message,
    )


def _turn_to(turn: Turn, tokens: Tokens | None, message_keys: Sequence[str]) -> trajectory_pb2.Turn:
    packed = tokens.fill(tokens_pb2.PackedTokens()) if tokens and tokens.spans else None
    return fields.message_of(
        trajectory_pb2.Turn,
        turn,
        tokens=packed and tokens_pb2.Tokens.FromString(packed.SerializeToString()),
        message_keys=message_keys,
        sampling=sampling.message(turn.sampling),
        drift=_drift_to(turn.drift),
    )


def _drift_to(drift: str) -> tokens_pb2.Drift | None:
    if not drift:
        return None
    position, recorded, retokenized = json.loads(drift)
    return tokens_pb2.Drift(position=position, recorded_text=recorded, retokenized_text=retokenized)


def sample_to(sample: sample_builder.Sample) -> trajectory_pb2.Sample:
    message = trajectory_pb2.Sample()
    fill_sample(message, sample)
    return message


def fill_sample(message: trajectory_pb2.Sample, sample: sample_builder.Sample) -> None:
    message.sample_id = sample.sample_id
    message.rollout_id = sample.rollout.rollout_id
    message.group_id = sample.rollout.group_id
    message.traceparent = sample.rollout.traceparent
    sample.tokens.fill(message.tokens)
    message.loss_mask = sample.loss_mask
    rewards = sample.rollout.outcome.rewards
    message.rewards.extend(reward.message() for reward in rewards if not reward.turn_id)
    message.turns.extend(sample.turns)
    message.truncated = sample.truncated
    message.rollout_truncated = sample.rollout_truncated
    message.min_weight_version = sample.min_weight_version
    message.max_weight_version = sample.max_weight_version


def add_routed_experts(message: trajectory_pb2.Sample, sample: sample_builder.Sample) -> int:
    """Add the routed experts of a sample that is to be trained; returns their size."""
    num_bytes = 0
    for routed in sample.routed:
        num_bytes += len(routed.experts)
        if num_bytes > _MAX_ROUTED_BYTES:
            _LOG.warning(
                "routed_experts_left_out", sample=sample.sample_id, from_token=routed.start
            )
            break
        message.routed_experts.add(**routed._asdict())
    return num_bytes
