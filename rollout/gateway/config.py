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
    """How a server is chosen: least_load, prefix_affinity, or "package.module:Name"."""
    poll_seconds: float = 0.2
    """How often each server is asked for its version and load."""
    default_heartbeat_seconds: float = 10.0
    """Silence on a stream longer than this is broken, where the caller names no interval."""
