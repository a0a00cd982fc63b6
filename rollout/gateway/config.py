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
    """Settings of a gateway. Any number of gateways may serve one run."""

    run_id: str
    """Training job whose rollout servers this gateway uses."""
    model: Path
    """Hugging Face folder with the tokenizer and the chat template."""
    credential_secret: str | None = field(default=None, metadata={"secret": True})
    """Key that credentials are derived from; gateways of one run share it. None: random."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Address of the trajectory manager, as host:port."""
    scheduler: str | None = None
    """Scheduler that lists the rollout servers; None: only `servers` are used."""
    servers: tuple[str, ...] = ()
    """Rollout servers in addition to the scheduler's, as host:port."""
    weights: str | None = None
    """Weights service that announces committed versions; None: any reported version is allowed."""
    max_version_lag: int = 1
    """A server gets turns while at most this many versions behind the newest committed one."""
    dispatch: str = "least_load"
    """Dispatch policy: least_load, prefix_affinity (a group's turns share a cache), cache_first
    (for agents of many turns), longest_first, skew_aware (separate servers for the longest turns),
    or "package.module:Name"."""
    decode_latency: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a decode step by batch size, for skew_aware: {1 = 0.0085, ...}. Empty: learned
    from the rates that servers report."""
    lengths: str = "running_means"
    """Length estimator: running_means, ranker, or "package.module:Name"."""
    ranker: str | None = None
    """Address of the ranker, for lengths = "ranker"."""
    overcommit: float = 1.25
    """A server gets up to this many times its slots in turns, so that no slot is idle."""
    max_waiting_turns: int = 16_384
    """Limit of the queue; a new turn beyond it fails with RESOURCE_EXHAUSTED."""
    required_weights_timeout_seconds: float = 600.0
    """How long a turn waits for its required weight version before it takes an older one: the
    trainer may have died before publishing it."""
    poll_seconds: float = 0.2
    """Interval between two polls of a server for its version and load."""
    default_heartbeat_seconds: float = 10.0
    """Interval between heartbeats on a silent stream, unless the agent names its own."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for settings with which no turn could be served."""
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
        """The table `decode_latency`; None if it is empty."""
        return DecodeLatency.from_table(self.decode_latency) if self.decode_latency else None
