"""The rules of a run as configuration: for whoever creates one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from seamflow.trajectory.v1.trajectory_pb2 import (
    Durability,
    ReplayConfig,
    ReplayStrategy,
    RunConfig,
    StalenessPolicy,
)

from services.chassis.config.load import ServerConfig

__all__ = ["RunRules", "rules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules(ServerConfig):
    """What `RunConfig` of the contract says, field by field."""

    group_size: int = 8
    """Samples of each task that are compared with each other."""
    groups_per_step: int = 16
    """Groups in a training step."""
    max_staleness: int = 2
    """Greatest allowed distance between a step's base version and a sample's oldest version."""
    staleness_policy: Literal["drop", "wait", "mask", "withhold"] = "drop"
    """What happens to samples beyond it."""
    publish_wait_seconds: float = 0.0
    """With wait: longest time that a publish waits for work that it would make too old."""
    lease_seconds: float = 20.0
    """Time after which a silent agent's or trainer's work is given to another."""
    zero_variance_reward: str = ""
    """Discard groups whose samples all got the same reward of this name; empty keeps all."""
    durability: Literal["fast", "durable", "replicated"] = "fast"
    """durable: every acknowledged write is on disk; replicated: also on every replica."""
    num_extra_samples: int = 0
    """Samples a group starts beyond group_size; it is complete with the first group_size."""
    fifo_window: int = 0
    """Groups, by admission, that a step may take from; 0: in the order they complete."""
    required_columns: tuple[str, ...] = ()
    """Columns that samples must have before their group is ready, such as ref_logprobs."""
    max_deliveries: int = 0
    """Trainers that may get a step and not commit it before it goes to the dead letters; 0: any."""
    max_stored_tokens: int = 0
    """Stored tokens beyond which no group starts; 0: any number."""
    retention_steps: int = 0
    """Steps after whose commit rollouts are deleted; 0: never."""
    replay_strategy: Literal["none", "recency", "reward"] = "none"
    """How groups that were trained are trained again."""
    replay_capacity_groups: int = 0
    """Trained groups kept for replay."""
    replay_groups_per_step: int = 0
    """Replayed groups beside the fresh ones of a step."""
    replay_reward_name: str = ""
    """With reward: the reward that weighs."""
    replay_temperature: float = 1.0
    """With reward: temperature of the weights."""


def rules(config: RunRules) -> RunConfig:
    """The message of these rules; the trajectory manager checks them."""
    return RunConfig(
        group_size=config.group_size,
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        staleness_policy=StalenessPolicy.Value(
            f"STALENESS_POLICY_{config.staleness_policy.upper()}"
        ),
        lease_seconds=config.lease_seconds,
        zero_variance_reward=config.zero_variance_reward,
        durability=Durability.Value(f"DURABILITY_{config.durability.upper()}"),
        publish_wait_seconds=config.publish_wait_seconds,
        num_extra_samples=config.num_extra_samples,
        fifo_window=config.fifo_window,
        required_columns=config.required_columns,
        max_deliveries=config.max_deliveries,
        max_stored_tokens=config.max_stored_tokens,
        retention_steps=config.retention_steps,
        replay=_replay(config),
    )


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
