"""Conversion between protobuf messages and the model; no logic."""

from __future__ import annotations

import json
from collections.abc import Sequence

from google.protobuf.timestamp_pb2 import Timestamp
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import task_service_pb2, trajectory_pb2, trajectory_service_pb2

from services.chassis.errors import invalid_argument
from trajectory_manager.api import validation
from trajectory_manager.model import prefix_tree
from trajectory_manager.model.records import (
    DeadLetter,
    Durability,
    FailureClass,
    Outcome,
    Purpose,
    Replay,
    ReplayStrategy,
    Reward,
    Rollout,
    RunConfig,
    StalenessPolicy,
    Task,
)
from trajectory_manager.model.token_bytes import (
    unpack_ids,
    unpack_logprobs,
)
from trajectory_manager.model.tokens import (
    BYTES_PER_TOKEN,
    RolloutFinish,
    Span,
    Tokens,
    Turn,
    TurnRecord,
)
from trajectory_manager.service import sample_builder


def packed_from(field: str, message: tokens_pb2.PackedTokens) -> Tokens:
    """Validated tokens; there may be none."""
    ids, logprobs = message.token_ids, message.logprobs
    validation.packed_tokens(field, ids, logprobs)
    return Tokens(ids, logprobs, validation.spans(message.spans, len(ids) // BYTES_PER_TOKEN))


def tokens_to(tokens: Tokens) -> tokens_pb2.Tokens:
    """The message that holds `tokens`."""
    message = tokens_pb2.Tokens(
        token_ids=unpack_ids(tokens.ids), logprobs=unpack_logprobs(tokens.logprobs)
    )
    _add_spans(message, tokens.spans)
    return message


def _add_spans(message: tokens_pb2.Tokens | tokens_pb2.PackedTokens, spans: Sequence[Span]) -> None:
    start = 0
    for span in spans:
        message.spans.add(
            start=start,
            num_tokens=span.num_tokens,
            origin=int(span.origin),
            weight_version=span.weight_version,
            version_source=int(span.version_source),
            server_id=span.server_id,
        )
        start += span.num_tokens


def config_from(message: trajectory_pb2.RunConfig) -> RunConfig:
    """The rules of a run; enums are required."""
    policy, durability = message.staleness_policy, message.durability
    if policy not in trajectory_pb2.StalenessPolicy.values()[1:]:
        raise invalid_argument("config.staleness_policy", policy, "DROP, WAIT, MASK or WITHHOLD")
    if durability not in trajectory_pb2.Durability.values()[1:]:
        raise invalid_argument("config.durability", durability, "FAST, DURABLE or REPLICATED")
    return RunConfig(
        group_size=message.group_size,
        groups_per_step=message.groups_per_step,
        max_staleness=message.max_staleness,
        staleness_policy=StalenessPolicy(policy),
        lease_seconds=message.lease_seconds,
        zero_variance_reward=message.zero_variance_reward,
        durability=Durability(durability),
        num_extra_samples=message.num_extra_samples,
        fifo_window=message.fifo_window,
        publish_wait_seconds=message.publish_wait_seconds,
        required_columns=tuple(message.required_columns),
        replay=_replay_from(message.replay),
        max_deliveries=message.max_deliveries,
        max_stored_tokens=message.max_stored_tokens,
        retention_steps=message.retention_steps,
    )


def _replay_from(message: trajectory_pb2.ReplayConfig) -> Replay | None:
    if not message.strategy:
        return None
    if int(message.strategy) not in set(ReplayStrategy):
        raise invalid_argument("config.replay.strategy", message.strategy, "RECENCY or REWARD")
    return Replay(
        strategy=ReplayStrategy(message.strategy),
        capacity_groups=message.capacity_groups,
        groups_per_step=message.groups_per_step,
        reward_name=message.reward_name,
        temperature=message.temperature,
    )


def purpose_from(field: str, value: int) -> Purpose:
    """A required purpose."""
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


def dead_letter_to(letter: DeadLetter) -> task_service_pb2.DeadLetter:
    """The message of a dead letter."""
    return task_service_pb2.DeadLetter(
        task=task_to(letter.task),
        reason=int(letter.reason),  # type: ignore[arg-type]
        message=letter.message,
        time=_timestamp(letter.time),
        rollout_ids=letter.rollout_ids,
    )


def outcome_from(
    rewards: Sequence[tokens_pb2.Reward], failure_class: int, failure_message: str
) -> Outcome:
    """The validated outcome of a rollout: reward names are unique per turn, values finite."""
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


def rollout_finish_from(
    message: trajectory_service_pb2.RolloutFinish,
) -> tuple[str, RolloutFinish]:
    """The run and the validated finish of a rollout."""
    finish = RolloutFinish(
        rollout_id=validation.name("rollout_id", message.rollout_id),
        credential_digest=validation.digest("credential_digest", message.credential_digest),
        outcome=outcome_from(message.rewards, message.failure_class, message.failure_message),
    )
    return validation.run_name(message.run_id), finish


def trajectory_to(rollout: Rollout, turns: Sequence[TurnRecord]) -> trajectory_pb2.Trajectory:
    """The message of a rollout; turns of which only spans were read have no tokens."""
    outcome = rollout.outcome
    message_keys = prefix_tree.message_keys([record.turn for record in turns])
    return trajectory_pb2.Trajectory(
        run_id=rollout.run_id,
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        purpose=int(rollout.purpose),  # type: ignore[arg-type]
        state=int(rollout.state),  # type: ignore[arg-type]
        turns=[
            _turn_to(record.turn, record.tokens, message_keys[record.turn.turn_id])
            for record in turns
        ],
        rewards=_rewards_to(rollout),
        failure_class=int(outcome.failure_class),  # type: ignore[arg-type]
        failure_message=outcome.failure_message,
        create_time=_timestamp(rollout.create_time),
        finish_time=_timestamp(rollout.finish_time) if rollout.finish_time else None,
        traceparent=rollout.traceparent,
    )


def _turn_to(turn: Turn, tokens: Tokens, message_keys: Sequence[str]) -> trajectory_pb2.Turn:
    begin = turn.begin
    return trajectory_pb2.Turn(
        turn_id=turn.turn_id,
        parent_turn_id=begin.parent_turn_id,
        prefix_length=begin.prefix_length,
        tokens=tokens_to(tokens) if tokens.ids else None,
        finish_reason=turn.finish_reason,  # type: ignore[arg-type]
        epoch=turn.epoch,
        message_keys=message_keys,
        temperature=begin.temperature,
        template_fingerprint=begin.template_fingerprint,
        drift=_drift_to(turn.drift),
    )


def drift_from(drift: trajectory_pb2.Drift) -> str:
    """The drift of a turn as JSON."""
    facts = (
        validation.not_negative("drift.position", drift.position),
        validation.text("drift.recorded_text", drift.recorded_text),
        validation.text("drift.retokenized_text", drift.retokenized_text),
    )
    return json.dumps(facts)


def _drift_to(drift: str) -> trajectory_pb2.Drift | None:
    if not drift:
        return None
    position, recorded, retokenized = json.loads(drift)
    return trajectory_pb2.Drift(
        position=position, recorded_text=recorded, retokenized_text=retokenized
    )


def sample_to(sample: sample_builder.Sample, *, packed: bool = False) -> trajectory_pb2.Sample:
    """The message of a sample, with its arrays as bytes if `packed`."""
    message = trajectory_pb2.Sample()
    fill_sample(message, sample, packed=packed)
    return message


def fill_sample(
    message: trajectory_pb2.Sample, sample: sample_builder.Sample, *, packed: bool
) -> None:
    """Write a sample into `message`."""
    message.sample_id = sample.sample_id
    message.rollout_id = sample.rollout.rollout_id
    message.group_id = sample.rollout.group_id
    message.rewards.extend(_rewards_to(sample.rollout))
    message.min_weight_version = sample.min_weight_version
    message.max_weight_version = sample.max_weight_version
    message.temperature = sample.temperature
    message.traceparent = sample.rollout.traceparent
    if packed:
        message.packed_tokens.token_ids = sample.tokens.ids
        message.packed_tokens.logprobs = sample.tokens.logprobs
        _add_spans(message.packed_tokens, sample.tokens.spans)
        message.packed_loss_mask = sample.loss_mask
    else:
        message.tokens.CopyFrom(tokens_to(sample.tokens))
        message.loss_mask.extend(map(bool, sample.loss_mask))


def _rewards_to(rollout: Rollout) -> list[tokens_pb2.Reward]:
    return [
        tokens_pb2.Reward(name=reward.name, value=reward.value, turn_id=reward.turn_id)
        for reward in rollout.outcome.rewards
    ]


def _timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp
