"""Between the contract's messages and `records.py`; nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.timestamp_pb2 import Timestamp
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import task_service_pb2, trajectory_pb2

from services.chassis.errors import invalid_argument
from trajectory_manager import samples, validation
from trajectory_manager.packing import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from trajectory_manager.records import (
    Durability,
    FailureClass,
    Outcome,
    Purpose,
    Reward,
    Rollout,
    RunConfig,
    StalenessPolicy,
    Task,
)
from trajectory_manager.token_records import Origin, Span, Tokens, Turn, VersionSource


def tokens_from(message: tokens_pb2.Tokens) -> Tokens:
    """Validated tokens as they are stored."""
    validation.tokens(message)
    return Tokens(
        ids=pack_ids(message.token_ids),
        logprobs=pack_logprobs(message.logprobs),
        spans=tuple(_span_from(span) for span in message.spans),
    )


def _span_from(span: tokens_pb2.Span) -> Span:
    return Span(
        num_tokens=span.num_tokens,
        origin=Origin(span.origin),
        weight_version=span.weight_version,
        version_source=VersionSource(span.version_source),
        server_id=span.server_id,
    )


def tokens_to(tokens: Tokens) -> tokens_pb2.Tokens:
    """The message that holds `tokens`."""
    message = tokens_pb2.Tokens(
        token_ids=unpack_ids(tokens.ids), logprobs=unpack_logprobs(tokens.logprobs)
    )
    start = 0
    for span in tokens.spans:
        message.spans.add(
            start=start,
            num_tokens=span.num_tokens,
            origin=int(span.origin),
            weight_version=span.weight_version,
            version_source=int(span.version_source),
            server_id=span.server_id,
        )
        start += span.num_tokens
    return message


def config_from(message: trajectory_pb2.RunConfig) -> RunConfig:
    """The rules of a run; enums must be given."""
    policy, durability = message.staleness_policy, message.durability
    if policy not in trajectory_pb2.StalenessPolicy.values()[1:]:
        raise invalid_argument("config.staleness_policy", policy, "DROP, MASK or WITHHOLD")
    if durability not in trajectory_pb2.Durability.values()[1:]:
        raise invalid_argument("config.durability", durability, "FAST or DURABLE")
    return RunConfig(
        group_size=message.group_size,
        groups_per_step=message.groups_per_step,
        max_staleness=message.max_staleness,
        staleness_policy=StalenessPolicy(policy),
        lease_seconds=message.lease_seconds,
        zero_variance_reward=message.zero_variance_reward,
        durability=Durability(durability),
    )


def purpose_from(field: str, value: int) -> Purpose:
    """A purpose that must be given."""
    if value not in set(Purpose):
        raise invalid_argument(field, value, "TRAIN or EVAL")
    return Purpose(value)


def task_from(message: task_service_pb2.Task, config: RunConfig) -> Task:
    """A validated task; its number of samples defaults to the run's group size, 1 for EVAL."""
    purpose = purpose_from("tasks.purpose", message.purpose)
    default = config.group_size if purpose is Purpose.TRAIN else 1
    num_samples = validation.bounded("tasks.num_samples", message.num_samples, 4096) or default
    return Task(
        task_id=validation.name("tasks.task_id", message.task_id),
        payload_json=validation.json_object("tasks.payload_json", message.payload_json),
        num_samples=num_samples,
        purpose=purpose,
    )


def task_to(task: Task) -> task_service_pb2.Task:
    """The message of a task."""
    return task_service_pb2.Task(
        task_id=task.task_id,
        payload_json=task.payload_json,
        num_samples=task.num_samples,
        purpose=int(task.purpose),  # type: ignore[arg-type]
    )


def outcome_from(
    rewards: Sequence[tokens_pb2.Reward], failure_class: int, failure_message: str
) -> Outcome:
    """How a rollout ended, validated: names are unique per turn, values finite."""
    if failure_class not in set(FailureClass):
        raise invalid_argument("failure_class", failure_class, "a known FailureClass")
    converted = tuple(
        Reward(
            name=validation.name("rewards.name", reward.name),
            value=validation.finite("rewards.value", reward.value),
            turn_id=validation.optional_name("rewards.turn_id", reward.turn_id),
        )
        for reward in rewards
    )
    if len({(reward.name, reward.turn_id) for reward in converted}) < len(converted):
        raise invalid_argument("rewards", [r.name for r in converted], "each name once per turn")
    return Outcome(
        rewards=converted,
        failure_class=FailureClass(failure_class),
        failure_message=validation.text("failure_message", failure_message),
    )


def trajectory_to(
    rollout: Rollout, turns: Sequence[Turn], tokens: Sequence[Tokens] | None
) -> trajectory_pb2.Trajectory:
    """The message of a rollout; without `tokens` its turns hold none."""
    added = tokens if tokens is not None else [Tokens()] * len(turns)
    outcome = rollout.outcome
    return trajectory_pb2.Trajectory(
        run_id=rollout.run_id,
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        purpose=int(rollout.purpose),  # type: ignore[arg-type]
        state=int(rollout.state),  # type: ignore[arg-type]
        turns=[_turn_to(turn, own) for turn, own in zip(turns, added, strict=True)],
        rewards=_rewards_to(rollout),
        failure_class=int(outcome.failure_class),  # type: ignore[arg-type]
        failure_message=outcome.failure_message,
        create_time=_timestamp(rollout.create_time),
        finish_time=_timestamp(rollout.finish_time) if rollout.finish_time else None,
        traceparent=rollout.traceparent,
    )


def _turn_to(turn: Turn, tokens: Tokens) -> trajectory_pb2.Turn:
    opening = turn.opening
    return trajectory_pb2.Turn(
        turn_id=turn.turn_id,
        parent_turn_id=opening.parent_turn_id,
        prefix_length=opening.prefix_length,
        tokens=tokens_to(tokens) if tokens.ids else None,
        finish_reason=turn.finish_reason,  # type: ignore[arg-type]
        epoch=turn.epoch,
        message_keys=turn.message_keys,
        temperature=opening.temperature,
        template_fingerprint=opening.template_fingerprint,
    )


def sample_to(sample: samples.Sample) -> trajectory_pb2.Sample:
    """The message of a sample."""
    return trajectory_pb2.Sample(
        sample_id=sample.sample_id,
        rollout_id=sample.rollout.rollout_id,
        group_id=sample.rollout.group_id,
        tokens=tokens_to(sample.tokens),
        loss_mask=sample.loss_mask,
        rewards=_rewards_to(sample.rollout),
        min_weight_version=sample.min_weight_version,
        max_weight_version=sample.max_weight_version,
        temperature=sample.temperature,
        traceparent=sample.rollout.traceparent,
    )


def _rewards_to(rollout: Rollout) -> list[tokens_pb2.Reward]:
    return [
        tokens_pb2.Reward(name=reward.name, value=reward.value, turn_id=reward.turn_id)
        for reward in rollout.outcome.rewards
    ]


def _timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp
