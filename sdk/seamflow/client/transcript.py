"""A rollout as plain values for people and tables: text of its turns, rewards, failure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.enum_names import enum_name
from seamflow.token_text import Decode
from seamflow.trajectory.v1 import trajectory_pb2


def transcript(trajectory: trajectory_pb2.Trajectory, decode: Decode) -> dict[str, Any]:
    """JSON values of a rollout; the text of a turn is what it added to the one that it continues.

    `rewards` are those of the whole rollout, by name; those of a turn are in `turns`. `failure` is
    None for a rollout that counts.
    """
    rewards = trajectory.rewards.rewards
    turns = [_turn(turn, rewards, decode) for turn in trajectory.turns]
    return {
        "task_id": trajectory.group_id,
        "rollout_id": trajectory.rollout_id,
        "purpose": enum_name(tokens_pb2.Purpose, trajectory.purpose),
        "state": enum_name(trajectory_pb2.RolloutState, trajectory.state),
        "weight_versions": sorted({each for turn in turns for each in turn["weight_versions"]}),
        "rewards": _named(rewards, ""),
        "policy_failure": trajectory.rewards.policy_failure,
        "truncated": trajectory.rewards.truncated,
        "failure": _failure(trajectory),
        "labels": dict(trajectory.labels),
        "turns": turns,
    }


def _turn(
    turn: trajectory_pb2.Turn, rewards: Iterable[tokens_pb2.Reward], decode: Decode
) -> dict[str, Any]:
    versions = {s.weight_version for s in turn.tokens.spans if s.origin == tokens_pb2.ORIGIN_POLICY}
    return {
        "turn_id": turn.turn_id,
        "continues_turn_id": turn.prefix_turn_id,
        "prompt": decode(_token_ids(turn, tokens_pb2.ORIGIN_ENVIRONMENT)),
        "answer": decode(_token_ids(turn, tokens_pb2.ORIGIN_POLICY)),
        "finish_reason": enum_name(tokens_pb2.FinishReason, turn.finish_reason),
        "weight_versions": sorted(versions),
        "rewards": _named(rewards, turn.turn_id),
    }


def _token_ids(turn: trajectory_pb2.Turn, origin: tokens_pb2.Origin.ValueType) -> list[int]:
    ids = turn.tokens.token_ids
    return [
        token_id
        for span in turn.tokens.spans
        if span.origin == origin
        for token_id in ids[span.start : span.start + span.num_tokens]
    ]


def _named(rewards: Iterable[tokens_pb2.Reward], turn_id: str) -> dict[str, float]:
    return {reward.name: reward.value for reward in rewards if reward.turn_id == turn_id}


def _failure(trajectory: trajectory_pb2.Trajectory) -> dict[str, str] | None:
    if not trajectory.HasField("failure"):
        return None
    name = enum_name(tokens_pb2.FailureClass, trajectory.failure.failure_class)
    return {"class": name, "message": trajectory.failure.message}
