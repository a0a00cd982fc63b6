"""Trajectory manager settings, table [trajectory_manager]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from services.chassis.config.settings import ServerConfig


class TrajectoryManagerConfig(ServerConfig):
    """Settings of the trajectory manager."""

    port: int = Field(50051, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    redis_url: SecretStr
    """Store: redis://:password@host:6379/0, redis+sentinel://host1,host2,host3/service/0 or
    redis+cluster://host1,host2/."""
    durability: Literal["fast", "durable", "replicated"] = "fast"
    """Durability the store must provide; checked against its settings at start, and again every
    5 seconds: while they give less, the store refuses calls."""
    replicas: int = Field(1, gt=0)
    """For durability replicated: replicas of each master, all of which confirm each write."""
    max_queued_tasks: int = Field(512, gt=0)
    """Tasks of a run that may be queued, of each purpose."""
    max_turn_tokens: int = Field(1 << 20, gt=0)
    """Tokens that one turn may append."""
    max_indexed_rollouts: int = Field(100_000, ge=0)
    """Rollouts of a run, the newest, that SearchRollouts finds by an index: about 120 bytes of the
    store for each. 0: no index, a search reads the header of each rollout."""
