"""Configuration of the weights process, table `[weights]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.chassis.config.load import ServerConfig

__all__ = ["WeightsConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig(ServerConfig):
    """What the weights process can be told."""

    port: int = 50055
    """gRPC port; 0 takes a free one."""
    folder: Path
    """Where versions are written, as `<run>/<model>/weight_v000001/`; shared with the trainers."""
    redis_url: str = field(metadata={"secret": True})
    """Store of versions and manifests, such as redis://:password@host:6379/0."""
    keep_versions: int = 4
    """Newest committed versions whose files stay; older ones are deleted after each commit."""
    poll_seconds: float = 0.2
    """Seconds after which a watcher hears of a version that another replica committed."""

    relay_trees: int = 4
    """Broadcast trees among relaying rollout servers; files of a version are dealt out to them."""
    relay_fanout: int = 2
    """Most servers that one server sends a file to."""
    relay_seconds: float = 60.0
    """Seconds after which a rollout server that no longer asks is no source for others."""
    rolling_servers: int = 1
    """Most rollout servers of a run that change weights at once, of those that ask (rolling)."""
    rolling_seconds: float = 60.0
    """Seconds after which a rollout server that was silent loses its place in that order."""

    def __post_init__(self) -> None:
        if self.keep_versions < 1:
            raise ValueError(f"keep_versions is {self.keep_versions}: it must be at least 1")
        for name in ("relay_trees", "relay_fanout", "rolling_servers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("poll_seconds", "relay_seconds", "rolling_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")
