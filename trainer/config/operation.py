"""Settings of a running trainer: nodes, batches, pipelines, checkpoints, weights, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.chassis.config.settings import Settings
from trainer.object_path import Folder, place


class GangConfig(Settings):
    """Nodes that the trainer requests from the scheduler."""

    id: str = "trainer"
    """Name of the gang."""
    nodes: int = Field(1, gt=0)
    """Nodes requested, all or none."""
    node_id: str = ""
    """Node that this rank runs on, as its node agent names it. With it the ranks' nodes and no
    others are requested; several nodes need it, one in the environment of each."""


class BatchConfig(Settings):
    """Which groups make a step, and how a step is cut into micro-batches."""

    timeout_seconds: float = Field(0.0, ge=0)
    """After this wait a step is trained on the groups that are ready; stragglers move to later
    steps, within max_staleness. 0: batches are always whole."""
    min_groups: int = Field(1, gt=0)
    """Least groups of a step after the timeout."""
    stream_groups: int = Field(0, ge=0)
    """Start the step once this many groups are ready and train the others as they arrive. 0: when
    all are ready, or at the tail."""
    start_at_tail: bool = False
    """Start the step when so few rollouts of the batch remain as the scheduler computes from
    measured lengths (RLHFuse's R_t), and train them as they arrive; stream_groups overrides it. For
    runs with max_staleness 0: where nodes go on with the next batch, no tail is left over."""
    micro_batch_tokens: int = Field(8192, gt=0)
    """Tokens of a forward pass on one rank, or on the ranks of a context_parallel group together,
    padding included. A longer sequence, or group for tba and dpo, is a pass by itself."""
    logit_tokens: int = Field(1024, gt=0)
    """Tokens whose logits are in memory at a time; those of a larger micro-batch are computed again
    in the backward pass."""
    packing: bool = True
    """Compute sequences without padding and shared prefixes once, where the model allows it."""
    replay_routed_experts: bool = True
    """Of a mixture of experts: let the routers choose for each token what the engine's chose, where
    rollout servers have recorded it (record_routed_experts). False: they choose for themselves."""


class PipelineConfig(Settings):
    """Models cut into stages, one of the policy's on each rank."""

    schedule: Literal["fused", "serial"] = "fused"
    """With a critic's own model: fill the idle times of one model with tasks of the other, or train
    the critic, then the policy, with one forward and one backward task in turn (1F1B)."""
    critic_stages: int = Field(0, ge=0)
    """Stages of the critic's own model, a divisor of the ranks: what is left of the ranks holds
    replicas, which share its micro-batches. 0: as many as ranks."""
    micro_batches_held: int = Field(0, ge=0)
    """Micro-batches, of all models together, whose activations a rank holds at most in a fused
    schedule; 0: no limit."""


class CheckpointConfig(Settings):
    """Durable checkpoints, written while training continues."""

    folder: Path
    """Folder of the checkpoints, shared by all ranks, and of what belongs to them."""
    store: str = Field("", pattern=r"^$|^[a-z0-9+]+://.+[^/]$")
    """URL of a folder in an object store, such as s3://bucket/my-run, that has the checkpoints
    instead; best checkpoint included. Dumps, marks and uploads stay in `folder`. Any URL of fsspec,
    whose package must be installed: s3fs is in the extra object-store. Credentials and endpoint are
    those of the package, such as AWS_PROFILE and AWS_ENDPOINT_URL."""
    every: int = Field(10, gt=0)
    """Steps between checkpoints; the last step always has one. After a crash the steps since the
    newest are computed again on the same samples, which the trajectory manager keeps until then."""
    keep: int = Field(2, gt=0)
    """Newest checkpoints that are kept."""

    @property
    def place(self) -> Folder:
        """Where the checkpoints are."""
        return place(self.store) if self.store else self.folder


class PublishConfig(Settings):
    """Published weight versions."""

    content: Literal["weights", "adapter"] = "weights"
    """Whole weights, or the LoRA adapter alone, which rollout servers add to the initial model."""
    every: int = Field(1, gt=0)
    """Steps between versions; the last step always publishes."""
    find_folder: bool = True
    """Write into the weights service's folder if a probe shows that this machine sees it under the
    same path; else weights are uploaded."""
    upload_folder: Path | None = None
    """Holds a version while it is uploaded, for this trainer alone, on each node the files of its
    ranks; unset: `upload` in the checkpoint folder."""
    compress: bool = False
    """Compress uploaded weights (Zstandard), for a slow network."""
    weight_connections: int = Field(1, ge=1)
    """Files that each rank uploads concurrently, each over a connection of its own: one carries no
    more than a TCP window in a round trip."""


class TrackingConfig(Settings):
    """Records of steps for people and programs."""

    metrics_file: Path | None = None
    """JSON lines, one per step."""
    trackers: tuple[str, ...] = ()
    """tensorboard, wandb, mlflow, or "package.module:Name"."""
    folder: Path | None = None
    """Folder that trackers write to; unset: `trackers` in the checkpoint folder."""
    project: str = "seamflow"
    """W&B's project, MLflow's experiment."""
    samples_every_steps: int = Field(10, ge=0)
    """Optimizer steps between tables of trained samples, with text and rewards, in samples_file
    and trackers; 0 for none."""
    num_samples: int = Field(4, ge=1)
    """Samples of such a table."""
    samples_file: Path | None = None
    """JSON lines, one per sample of those tables."""
    recorded_steps: int = Field(20, ge=0)
    """Newest steps of which the trajectory manager keeps what was trained on: of each sample its
    reward, advantage, ratio and staleness, of each trained token the difference of its log-probs
    and its advantage, in 2 to 4 bytes. Recorded beside training; a step that ends while the one
    before is recorded is left out. 0: nothing is recorded."""
