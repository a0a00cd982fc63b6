"""Rows of lists: what is known of a rollout without its turns, and of how it was trained."""

from __future__ import annotations

import math
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.durations import seconds_of
from seamflow.enum_names import enum_name
from seamflow.trajectory.v1 import trajectory_pb2

Values = dict[str, Any]


def rollout_row(
    summary: trajectory_pb2.RolloutSummary, trained: trajectory_pb2.TrainedSample | None = None
) -> Values:
    """A row; what is not known is None."""
    has_versions = summary.HasField("min_weight_version")
    begin = seconds_of(summary.create_time) if summary.HasField("create_time") else None
    end = seconds_of(summary.finish_time) if summary.HasField("finish_time") else None
    return {
        "rollout_id": summary.rollout_id,
        "group_id": summary.group_id,
        "purpose": enum_name(tokens_pb2.Purpose, summary.purpose).lower(),
        "state": enum_name(trajectory_pb2.RolloutState, summary.state).lower(),
        "reward": _reward(summary, trained),
        "tokens": summary.num_tokens,
        "policy_tokens": summary.num_policy_tokens,
        "turns": summary.num_turns,
        "tool_calls": None,
        "version_from": summary.min_weight_version if has_versions else None,
        "version_to": summary.max_weight_version if has_versions else None,
        "failure": _name(tokens_pb2.FailureClass, summary.failure_class),
        "finish": _name(tokens_pb2.FinishReason, summary.finish_reason),
        "truncated": summary.truncated,
        "start": begin,
        "end": end,
        "seconds": None if begin is None or end is None else max(end - begin, 0.0),
        "step": summary.step or None,
        **trained_values(trained),
    }


def _reward(
    summary: trajectory_pb2.RolloutSummary, trained: trajectory_pb2.TrainedSample | None
) -> float | None:
    """Of several the trained one, which its step knows."""
    if trained is not None and trained.HasField("reward"):
        return trained.reward
    return summary.reward if summary.HasField("reward") else None


def trained_values(sample: trajectory_pb2.TrainedSample | None) -> Values:
    """What is known of the training of a sample; all None for one that no step recorded."""
    if sample is None:
        names = ("sample_id", "trained_tokens", "staleness", "ratio", "ratio_max")
        return dict.fromkeys((*names, "logprob_diff", "logprob_diff_max", "advantage"))
    return {
        "sample_id": sample.sample_id,
        "trained_tokens": sample.num_trained_tokens,
        "staleness": sample.staleness,
        "ratio": _optional(sample, "ratio_mean"),
        "ratio_max": _optional(sample, "ratio_max"),
        "logprob_diff": _optional(sample, "logprob_difference_mean"),
        "logprob_diff_max": _optional(sample, "logprob_difference_max"),
        "advantage": _optional(sample, "advantage_mean"),
    }


def _optional(sample: trajectory_pb2.TrainedSample, name: Any) -> float | None:
    value: float = getattr(sample, name)
    return value if sample.HasField(name) and math.isfinite(value) else None


def _name(kind: Any, value: int) -> str | None:
    return enum_name(kind, value).lower() if value else None
