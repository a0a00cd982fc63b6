"""Configuration of the ranker, table `[ranker]`."""

from __future__ import annotations

from dataclasses import dataclass

from services.chassis.config.load import ServerConfig

__all__ = ["RankerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankerConfig(ServerConfig):
    """Settings of the ranker."""

    run_id: str
    """Training job whose turns it learns from."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Address of the trajectory manager, as host:port."""
    window_prompts: int = 4096
    """Latest prompts that it keeps. Its memory grows with their square (4,096: 0.3 GB), its
    training with their cube (4,096: some seconds of one core)."""
    train_every_turns: int = 512
    """Number of ended turns after which the model is fitted again."""
    poll_seconds: float = 1.0
    """Interval of polling the trajectory manager."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for settings with which no model can be fitted."""
        for name, least in (("window_prompts", 16), ("train_every_turns", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least {least}")
        if self.poll_seconds <= 0:
            raise ValueError(f"poll_seconds is {self.poll_seconds}: must be over 0")
