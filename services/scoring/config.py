"""Scoring service settings, table [scoring]."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from services.chassis.config.settings import ServerConfig


class ScoringConfig(ServerConfig):
    """Settings of a scoring service, which computes one column; run one or more per column."""

    run_id: str
    """Training job whose samples are scored."""
    column: str
    """Column that is written, one of the run's required_columns."""
    model: Path
    """Hugging Face folder of the frozen model."""
    policy_model: Path | None = None
    """Hugging Face folder of the policy's model. logprobs refuses a model with another tokenizer; a
    reward_model with another one, or another chat template, gets the text. Unset: both have the
    same."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Address of the trajectory manager, which leases samples."""
    scorer: str = "logprobs"
    """What is computed: logprobs of the sampled tokens, reward_model, or "package.module:Name"."""
    needs: tuple[str, ...] = ()
    """Columns that a sample must have first; the scorer gets them too."""
    max_samples: int = Field(32, ge=1, le=512)
    """Samples leased together; they must be scored within the run's lease_seconds."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Tokens of a forward pass; a prefix that samples share counts once, padding is included."""
    packing: bool = True
    """Compute without padding, and a prefix that leased samples share once; a model that cannot is
    found out at start and computes padded rows."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Floating-point type of the computation."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    cpu_offload: bool = False
    """Keep the weights in host memory and copy each block in while the block before computes; the
    device holds two blocks at a time, embeddings and head aside."""
    threads: int = Field(1, ge=1)
    """CPU threads."""
    node_agent: bool = False
    """Start OFF, without model and leases, until a node agent activates it by WorkerService; by
    default it is ON from the start."""

    scheduler: str | None = None
    """Address of the scheduler: the node is requested there while samples lack the column. Unset:
    it is not requested. Needs node_agent."""
    node_id: str = ""
    """Node that the service computes on, as its node agent names it; requested by this name."""
    node_tag: str = "score"
    """Activity tag under which the node agent has this service as a worker."""
    request_samples: int = Field(64, ge=1)
    """Samples without the column that are worth a switch of the node; fewer are when no rollout
    runs any more."""
    start_at_tail: bool = False
    """Request the node when so few rollouts of a batch remain as the scheduler computes from
    measured lengths and times (RLHFuse's R_t), and hold it until the batch is scored, instead of
    `request_samples`. For a column that one node computes, which also rolls out."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scheduler and not (self.node_agent and self.node_id):
            raise ValueError(
                f"scheduler is {self.scheduler!r}, node_agent {self.node_agent} and node_id "
                f"{self.node_id!r}: a node is requested for a service under a node agent; set both"
            )
        if self.start_at_tail and not self.scheduler:
            raise ValueError(
                "start_at_tail is true but scheduler is not set, which computes when the tail "
                "begins: give its address, with node_agent and node_id, or remove start_at_tail"
            )
        if self.column in self.needs:
            raise ValueError(
                f"needs holds {self.column!r}, which is the column to write: remove it"
            )
        return self
