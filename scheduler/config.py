"""Scheduler settings, table [scheduler]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, model_validator

from services.chassis.config.settings import ServerConfig, Settings


class AllocationConfig(Settings):
    """Moves of nodes between training and generation while a run goes on."""

    min_train_nodes: int = Field(1, ge=1)
    """Least nodes of a trainer."""
    max_train_nodes: int = Field(0, ge=0)
    """Most nodes of a trainer. 0: no node moves, every trainer keeps the nodes of its gang."""

    @model_validator(mode="after")
    def _check_order(self) -> AllocationConfig:
        if 0 < self.max_train_nodes < self.min_train_nodes:
            raise ValueError(
                f"max_train_nodes is {self.max_train_nodes} and min_train_nodes "
                f"{self.min_train_nodes}: give at least as many, or 0 for no moves"
            )
        return self


class SchedulerConfig(ServerConfig):
    """Settings of the scheduler."""

    port: int = Field(50053, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    redis_url: SecretStr
    """Store of nodes, gangs and epochs, such as redis://:password@host:6379/0."""
    lease_seconds: float = Field(10.0, gt=0)
    """A node agent that cannot heartbeat for this long stops its work."""
    policy: str = "preemptive"
    """Allocation policy: preemptive, or "package.module:Name"."""
    lending: Literal["gated", "always", "never"] = "gated"
    """Whether nodes of a gang roll out while the gang does not need them: when measurements say
    that it pays; always; or never."""
    allocation: AllocationConfig = AllocationConfig()
    """Moves of nodes between training and generation."""
    min_dwell_seconds: float = Field(0.0, ge=0)
    """Time before a node that a gang released may be lent; set it to the cost of a switch."""
