"""What a rollout server can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.chassis.config import ServerConfig

__all__ = ["RolloutServerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutServerConfig(ServerConfig):
    """Configuration of one rollout server; table [rollout_server]."""

    port: int = 50056
    """gRPC port; 0 takes a free one."""
    engine: str = "torch"
    """"torch", "fake", or a plug-in as "package.module:Name"."""
    model: Path | None = None
    """Hugging Face folder the run starts from, version 0; the fake engine needs none."""
    run_id: str = "default"
    """Training job whose turns are served and whose weights are followed."""
    model_name: str = "policy"
    """Name under which the weights service knows the model."""
    weights: str | None = None
    """Address of the weights service; without it version 0 is served for ever."""
    cache_folder: Path | None = None
    """Where fetched weights are kept, for this server alone; by default a temporary folder."""
    server_id: str | None = None
    """Name stamped on every span, unique in the run; by default host name and process id."""
    max_running: int = 64
    """Sequences sampled at the same time; more wait."""
    max_context: int | None = None
    """Most tokens in one sequence; by default what the model allows."""
    threads: int = 1
    """Threads of each tensor operation."""
    stream_interval: int = 8
    """Tokens of a sequence sent in one message; fewer when 50 ms pass or the sequence ends."""
    prefill_tokens: int = 4096
    """Most padded prompt tokens the torch engine prefills between two steps."""
    fake_step_seconds: float = 0.0
    """Fake engine: time from one token to the next."""
    fake_mean_tokens: int = 64
    """Fake engine: mean length of an output; 0 never ends one by itself."""
    fake_vocab_size: int = 1024
    """Fake engine: number of token ids."""

    def __post_init__(self) -> None:
        """Refuse what no engine can be built with."""
        for name in ("max_running", "threads", "stream_interval", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(f"max_context is {self.max_context}: must be at least 2")
        if self.fake_step_seconds < 0 or self.fake_mean_tokens < 0 or self.fake_vocab_size < 2:
            raise ValueError("fake_*: seconds and tokens are at least 0, the vocabulary at least 2")
