"""Rules of a run as settings, shared by the launcher and `deploy.create_run`."""

from __future__ import annotations

from typing import Literal

from google.protobuf.duration_pb2 import Duration
from pydantic import Field
from seamflow.durations import to_duration
from seamflow.trajectory.v1.trajectory_pb2 import (
    Durability,
    ReplayConfig,
    ReplayStrategy,
    RunConfig,
    StalenessPolicy,
)

from services.chassis.config.settings import ServerConfig


class RunRules(ServerConfig):
    """The fields of `RunConfig` of the contract."""

    group_size: int = Field(8, ge=1)
    """Rollouts per task, compared with each other."""
    groups_per_step: int = Field(16, ge=1)
    """Groups in a training step."""
    max_staleness: int = Field(2, ge=0)
    """Greatest allowed distance between a step's base version and a sample's oldest version."""
    staleness_policy: Literal["drop", "wait", "mask", "withhold"] = "drop"
    """Treatment of samples beyond max_staleness."""
    publish_wait_seconds: float = Field(0.0, ge=0)
    """With wait: longest time a publish waits for rollouts that it would make too old."""
    lease_seconds: float = Field(20.0, gt=0)
    """Time after which the lease of a silent agent or trainer expires."""
    zero_variance_reward: str = ""
    """Discard groups whose samples all got the same reward of this name; empty keeps all."""
    reward_name: str = ""
    """Reward that the trainer trains on: a rollout that lacks it is refused; empty: any will do."""
    labels: dict[str, str] = Field({})
    """For people and dashboards."""
    durability: Literal["fast", "durable", "replicated"] = "fast"
    """durable: every acknowledged write is on disk; replicated: also on every replica."""
    num_extra_samples: int = Field(0, ge=0)
    """Samples a group starts beyond group_size; it is complete with the first group_size."""
    fifo_window: int = Field(0, ge=0)
    """Groups, by admission, that a step may take from; 0: in the order they complete."""
    required_columns: tuple[str, ...] = ()
    """Columns that samples must have before their group is ready, such as ref_logprobs."""
    max_deliveries: int = Field(0, ge=0)
    """Deliveries of a step without a commit before its groups become dead letters; 0: no limit."""
    max_stored_tokens: int = Field(0, ge=0)
    """Stored tokens beyond which no group is admitted; 0: no limit."""
    retention_steps: int = Field(0, ge=0)
    """Steps committed after a group was trained before its rollouts are deleted; 0: never."""
    replay_strategy: Literal["none", "recency", "reward"] = "none"
    """How committed groups are drawn for replay."""
    replay_capacity_groups: int = Field(0, ge=0)
    """Committed groups kept for replay."""
    replay_groups_per_step: int = Field(0, ge=0)
    """Replayed groups per step, in addition to groups_per_step."""
    replay_reward_name: str = ""
    """With reward: name of the reward that weighs groups."""
    replay_temperature: float = 1.0
    """With reward: temperature of the weights."""


def rules(config: RunRules) -> RunConfig:
    """The contract's message; the trajectory manager validates it."""
    return RunConfig(
        group_size=config.group_size,
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        staleness_policy=StalenessPolicy.Value(
            f"STALENESS_POLICY_{config.staleness_policy.upper()}"
        ),
        lease_duration=to_duration(config.lease_seconds),
        zero_variance_reward=config.zero_variance_reward,
        durability=Durability.Value(f"DURABILITY_{config.durability.upper()}"),
        max_publish_wait=_optional_duration(config.publish_wait_seconds),
        num_extra_samples=config.num_extra_samples,
        fifo_window=config.fifo_window,
        required_columns=config.required_columns,
        max_deliveries=config.max_deliveries,
        max_stored_tokens=config.max_stored_tokens,
        retention_steps=config.retention_steps,
        replay=_replay(config),
        reward_name=config.reward_name,
        labels=config.labels,
    )


def _optional_duration(seconds: float) -> Duration | None:
    return to_duration(seconds) if seconds else None


def _replay(config: RunRules) -> ReplayConfig | None:
    if config.replay_strategy == "none":
        return None
    return ReplayConfig(
        strategy=ReplayStrategy.Value(f"REPLAY_STRATEGY_{config.replay_strategy.upper()}"),
        capacity_groups=config.replay_capacity_groups,
        groups_per_step=config.replay_groups_per_step,
        reward_name=config.replay_reward_name,
        temperature=config.replay_temperature,
    )
