"""Ranker settings, table [ranker]."""

from __future__ import annotations

from pydantic import Field

from services.chassis.config.settings import ServerConfig

__all__ = ["RankerConfig"]


class RankerConfig(ServerConfig):
    """Settings of the ranker."""

    run_id: str
    """Training job whose turns it learns from."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Address of the trajectory manager, which holds the recorded turns."""
    window_prompts: int = Field(4096, ge=16)
    """Newest prompts it learns from. Memory grows with their square (4,096: 0.3 GB), training time
    with their cube (4,096: some seconds of one core)."""
    train_every_turns: int = Field(512, ge=1)
    """Turns that end between two trainings."""
    poll_seconds: float = Field(1.0, gt=0)
    """Time between two reads of newly ended turns."""
