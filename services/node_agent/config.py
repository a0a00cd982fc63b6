"""Configuration of the node agent, table `[node_agent]`."""

from __future__ import annotations

from dataclasses import dataclass

from services.chassis.config import ServerConfig

__all__ = ["NodeAgentConfig"]

_ADDRESS_FIELDS = {"rollout": "rollout_server", "train": "trainer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAgentConfig(ServerConfig):
    """What a node agent can be told. It starts no process: the launcher or compose does."""

    port: int = 50057
    """gRPC port, for health checks; 0 takes a free one."""
    node_id: str
    """Name of the node, unique among all that share the scheduler."""
    run_id: str
    """Training job the node works for."""
    capability_tags: tuple[str, ...]
    """What the node can do: "rollout", "train" or both."""
    scheduler: str = "127.0.0.1:50053"
    """Address of the scheduler."""
    rollout_server: str | None = None
    """Address of the node's rollout server; needed with the tag "rollout"."""
    trainer: str | None = None
    """Address of the node's trainer, rank 0; needed with the tag "train"."""
    train_priority: float = 0.0
    """Higher: taken first for training."""
    recheck_seconds: float = 5.0
    """How often the workers are made sure of: one may have been restarted."""

    def __post_init__(self) -> None:
        if not self.capability_tags:
            raise ValueError("capability_tags is empty: name at least one of rollout, train")
        for tag in self.capability_tags:
            if tag not in _ADDRESS_FIELDS:
                raise ValueError(f"capability_tags holds {tag!r}: it can hold rollout and train")
        for tag, field in _ADDRESS_FIELDS.items():
            if (tag in self.capability_tags) != (getattr(self, field) is not None):
                raise ValueError(f"{field} must be set if and only if capability_tags holds {tag}")
        if self.recheck_seconds <= 0:
            raise ValueError(f"recheck_seconds is {self.recheck_seconds}: it must be above 0")

    @property
    def workers(self) -> dict[str, str]:
        """Address of each worker by its capability tag."""
        return {tag: getattr(self, _ADDRESS_FIELDS[tag]) for tag in self.capability_tags}
