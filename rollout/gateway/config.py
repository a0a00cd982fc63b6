"""Configuration of the rollout gateway, table [rollout_gateway]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.chassis.config.load import ServerConfig
from services.lib.decode_latency import DecodeLatency

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
    """Which turn gets which server: least_load, prefix_affinity, longest_first, skew_aware (ends a
    step soonest), or "package.module:Name"."""
    decode_latency: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a decode step of your servers by batch size, for skew_aware: {1 = 0.0085, ...}.
    Empty: learned from what servers report."""
    lengths: str = "running_means"
    """How long turns will be: running_means, ranker, or "package.module:Name"."""
    ranker: str | None = None
    """Where lengths are predicted, for lengths = "ranker"."""
    overcommit: float = 1.25
    """A server gets turns up to this many times its slots, so that none of them is ever idle."""
    max_waiting_turns: int = 16_384
    """New turns beyond these that have no server yet are refused with RESOURCE_EXHAUSTED."""
    required_weights_timeout_seconds: float = 600.0
    """A turn waits so long for weights that its group needs, then it takes older ones: they may
    never come, if a trainer died before it published them."""
    poll_seconds: float = 0.2
    """How often each server is asked for its version and load."""
    default_heartbeat_seconds: float = 10.0
    """Silence on a stream longer than this is broken, where the caller names no interval."""

    def __post_init__(self) -> None:
        """Refuse what would let no turn through."""
        self.server_latency()
        if (self.lengths == "ranker") != (self.ranker is not None):
            raise ValueError(
                f"lengths is {self.lengths!r} and ranker is {self.ranker!r}: "
                'for the ranker give its address and lengths = "ranker", else neither'
            )
        if self.overcommit <= 0:
            raise ValueError(f"overcommit is {self.overcommit}: must be over 0")
        if self.max_waiting_turns < 1:
            raise ValueError(f"max_waiting_turns is {self.max_waiting_turns}: must be at least 1")
        if self.required_weights_timeout_seconds < 0:
            raise ValueError(
                f"required_weights_timeout_seconds is {self.required_weights_timeout_seconds}: "
                "must be at least 0"
            )

    def server_latency(self) -> DecodeLatency | None:
        """The table `decode_latency`; None: there is none."""
        return DecodeLatency.from_table(self.decode_latency) if self.decode_latency else None
