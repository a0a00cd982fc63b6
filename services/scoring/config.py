"""Configuration of a scoring service, table `[scoring]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.chassis.config.load import ServerConfig

__all__ = ["ScoringConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringConfig(ServerConfig):
    """One service computes one column; start as many as there are columns, or more."""

    run_id: str
    """Training job whose samples are scored."""
    column: str
    """Column that is written, one of the run's required_columns."""
    model: Path
    """Hugging Face folder of the frozen model."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Where the samples are."""
    scorer: str = "logprobs"
    """What is computed: logprobs of the sampled tokens, reward_model, or "package.module:Name" of
    your own."""
    needs: tuple[str, ...] = ()
    """Columns that a sample must have first; the scorer gets them too."""
    max_samples: int = 32
    """Samples that are leased at once: they must be scored before the run's lease_seconds pass."""
    micro_batch_tokens: int = 8192
    """Tokens of a forward pass, padding included."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of the computation."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    cpu_offload: bool = False
    """Keep the weights in the host's memory, and swap each block in while the one before it
    computes: the device holds two at a time, embeddings and head aside."""
    threads: int = 1
    """CPU threads."""

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 1 <= self.max_samples <= 512:
            raise ValueError(f"max_samples is {self.max_samples}: give 1 to 512")
        for name in ("micro_batch_tokens", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
        if self.column in self.needs:
            raise ValueError(f"needs holds {self.column!r}, which is the column to write: leave it")
