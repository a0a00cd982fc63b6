"""Configuration of the ranker, table `[ranker]`."""

from __future__ import annotations

from dataclasses import dataclass

from services.chassis.config.load import ServerConfig

__all__ = ["RankerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankerConfig(ServerConfig):
    """What the ranker can be told."""

    run_id: str
    """Training job whose turns it learns from."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Where these are recorded."""
    window_prompts: int = 4096
    """Prompts it remembers, newest first. Its memory grows with their square (4,096: 0.3 GB), its
    training with their cube (4,096: some seconds of one core)."""
    train_every_turns: int = 512
    """It learns anew after so many turns that have ended."""
    poll_seconds: float = 1.0
    """How often the trajectory manager is asked for them."""

    def __post_init__(self) -> None:
        """Refuse what nothing could be learned with."""
        for name, least in (("window_prompts", 16), ("train_every_turns", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least {least}")
        if self.poll_seconds <= 0:
            raise ValueError(f"poll_seconds is {self.poll_seconds}: must be over 0")
