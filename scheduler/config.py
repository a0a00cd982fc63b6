"""Configuration of the scheduler, table `[scheduler]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from services.chassis.config.load import ServerConfig

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(ServerConfig):
    """Scheduler settings."""

    port: int = 50053
    """gRPC port; 0 takes a free one."""
    redis_url: str = field(metadata={"secret": True})
    """Store of nodes, gangs and epochs, such as redis://:password@host:6379/0."""
    lease_seconds: float = 10.0
    """A node agent that cannot heartbeat for this long stops its work."""
    lease_margin_seconds: float = 2.0
    """Time from the end of a node's lease until the node is lost."""
    policy: str = "preemptive"
    """Allocation policy: a built-in one, or "package.module:Class"."""
    lending: Literal["gated", "always", "never"] = "gated"
    """Whether nodes of gangs do rollout while no gang needs them: gated: when measurements show
    that it pays; always; or never."""
    min_dwell_seconds: float = 0.0
    """Time before a released node is lent; set it to the cost of a switch."""
    leave_seconds: float = 120.0
    """Time for a node to leave its old work for a gang; after it, the gang gets another node."""
    max_events: int = 100_000
    """Entries the audit log keeps."""

    def __post_init__(self) -> None:
        for name in ("lease_seconds", "lease_margin_seconds", "leave_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")
        if self.min_dwell_seconds < 0:
            raise ValueError(f"min_dwell_seconds is {self.min_dwell_seconds}: it must not be < 0")
        if self.max_events < 1:
            raise ValueError(f"max_events is {self.max_events}: it must be at least 1")
