"""Configuration of the trajectory manager."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from services.chassis.config.load import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryManagerConfig(ServerConfig):
    """Trajectory manager settings, table [trajectory_manager]."""

    port: int = 50051
    """gRPC port; 0 takes a free one."""
    redis_url: str = field(metadata={"secret": True})
    """Store: redis://:password@host:6379/0, redis+sentinel://host1,host2,host3/service/0 or
    redis+cluster://host1,host2/."""
    durability: Literal["fast", "durable", "replicated"] = "fast"
    """Durability class that the store must give; checked against its settings at start."""
    replicas: int = 1
    """For durability replicated: replicas of each master. All of them confirm each write."""
    start_seconds: float = 15.0
    """Seconds to wait at start for a store that does not answer."""
    max_queued_tasks: int = 512
    """Queued tasks of a run, for each purpose."""
    max_turn_tokens: int = 1 << 20
    """Tokens that one turn may add."""
    max_inflight_bytes: int = 32 << 20
    """Bytes of tokens in flight to the store; beyond it appends get RESOURCE_EXHAUSTED."""
    sweep_seconds: float = 1.0
    """Seconds between two sweeps for expired leases and unsettled rollouts."""

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in (
            "replicas",
            "start_seconds",
            "max_queued_tasks",
            "max_turn_tokens",
            "max_inflight_bytes",
            "sweep_seconds",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: must be more than 0")
