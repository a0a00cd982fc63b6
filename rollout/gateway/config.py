"""Configuration of the rollout gateway, table [rollout_gateway]."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.chassis.config import ServerConfig

__all__ = ["GatewayConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServerConfig):
    """What a gateway needs to know. Any number of gateways may serve one run."""

    run_id: str
    """Training job whose rollout servers this gateway uses."""
    model: Path
    """Hugging Face folder with the tokenizer and the chat template."""
    credential_secret: str | None = field(default=None, metadata={"secret": True})
    """Key that credentials are derived from; gateways of one run share it. None: random."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Where tokens are recorded."""
    scheduler: str | None = None
    """Where rollout servers are found; without it only `servers` are used."""
    servers: tuple[str, ...] = ()
    """Rollout servers to use besides the scheduler's, as host:port."""
    weights: str | None = None
    """Where committed versions are announced; without it every reported version is allowed."""
    max_version_lag: int = 1
    """A server may be this many versions behind the newest committed one and still get turns."""
    dispatch: str = "least_load"
    """Which turn gets which server: least_load, prefix_affinity, longest_first (ends a step
    soonest), or "package.module:Name"."""
    overcommit: float = 1.25
    """A server gets turns up to this many times its slots, so that none of them is ever idle."""
    max_waiting_turns: int = 16_384
    """New turns beyond these that have no server yet are refused with RESOURCE_EXHAUSTED."""
    hedge_after_seconds: float | None = None
    """A turn without its first token for so long is started on a second server too; None: never."""
    poll_seconds: float = 0.2
    """How often each server is asked for its version and load."""
    default_heartbeat_seconds: float = 10.0
    """Silence on a stream longer than this is broken, where the caller names no interval."""

    def __post_init__(self) -> None:
        """Refuse what would let no turn through."""
        if self.overcommit <= 0:
            raise ValueError(f"overcommit is {self.overcommit}: must be over 0")
        if self.max_waiting_turns < 1:
            raise ValueError(f"max_waiting_turns is {self.max_waiting_turns}: must be at least 1")
        if self.hedge_after_seconds is not None and self.hedge_after_seconds <= 0:
            raise ValueError(
                f"hedge_after_seconds is {self.hedge_after_seconds}: must be over 0, or left out"
            )
