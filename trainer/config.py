"""Trainer settings, table `[trainer]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from services.chassis.config.load import ServerConfig
from services.lib.weight_files.folder_names import fingerprint

__all__ = ["ImportanceWay", "KLEstimator", "LossWeights", "Setting", "TrainerConfig"]

ImportanceWay = Literal["truncate", "mask", "icepop", "none"]
"""Importance weight of a token that older weights sampled."""
LossWeights = Literal["algorithm", "token_mean", "sequence_mean", "sequence_sum", "constant"]
"""Loss aggregation."""
KLEstimator = Literal["k1", "k2", "k3"]
"""Estimator of the KL divergence from a reference."""


Setting = str | int | float | bool | None | list[str]
"""A setting's value, as in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(ServerConfig):
    """Settings of one training gang; every rank reads the same file."""

    run_id: str
    """Training job; must exist in the trajectory manager."""
    model: Path
    """Hugging Face folder of a causal language model: config, safetensors, tokenizer."""
    checkpoint_folder: Path
    """Where checkpoints are written; shared by all ranks."""

    trajectory_manager: str = "127.0.0.1:50051"
    """Address (host:port) of the SampleService."""
    weights: str = "127.0.0.1:50055"
    """Address of the WeightService."""
    scheduler: str | None = None
    """Address of the SchedulerService; without one the trainer always holds its devices."""
    gang_id: str = "trainer"
    """Id of this gang in the scheduler."""
    gang_nodes: int = 1
    """Nodes that the gang requests, all or none."""
    request_ahead_seconds: float = 30.0
    """Request nodes before the batch is full, earlier by the time they need to return, but by at
    most this. 0: when it is full."""

    batch_timeout_seconds: float = 0.0
    """After this wait, train the step on the groups that are complete. Stragglers move to later
    steps, within max_staleness. 0: wait for full batches."""
    batch_min_groups: int = 1
    """Minimum number of groups of a step after batch_timeout_seconds."""

    stream_groups: int = 0
    """Start the step once this many groups are ready, and train the others as they complete. 0:
    wait for all."""

    num_steps: int = 100
    """Optimizer steps of the run."""
    algorithm: str = "dapo"
    """Built-in algorithm, or a plug-in "package.module:Name"."""
    reward: str = "reward"
    """Name of the reward to train on."""
    shuffle_rewards: bool = False
    """Permute the rewards over a step's rollouts: a control experiment that must not learn."""
    clip_low: float | None = None
    """Trust region: lower clip range of the ratio, 1 - clip_low. inf: none; not set: the
    algorithm's default."""
    clip_high: float | None = None
    """Trust region: upper clip range of the ratio, 1 + clip_high. inf: none; not set: the
    algorithm's default."""
    importance: ImportanceWay = "truncate"
    """Importance weight of a token that older weights sampled. truncate: the ratio, at most
    importance_cap; mask: 0 for ratios above it; icepop: also 0 below importance_floor; none: 1 for
    all tokens, without clipping."""
    importance_cap: float = 2.0
    """Largest importance weight of a token."""
    importance_floor: float = 0.5
    """Smallest ratio that icepop trains on."""
    staleness_decay: float = 1.0
    """Factor of a token's weight for each version of staleness; 1: none."""
    advantage_epsilon: float = 1e-4
    """Added to the standard deviation of rewards."""
    loss_weights: LossWeights = "algorithm"
    """Loss aggregation: mean over the step's tokens; mean over rollouts of their token mean, or of
    their token sum; or token sum divided by loss_length. algorithm: the algorithm's default."""
    loss_length: int = 0
    """Divisor of the "constant" loss: the maximum number of tokens a rollout may sample."""
    overlong_tokens: int = 0
    """Rollouts with more trainable tokens lose 1 of their reward (DAPO's soft punishment); 0: no
    limit."""
    overlong_buffer_tokens: int = 0
    """The penalty starts this many tokens before the limit and grows linearly."""

    reference_column: str = ""
    """Column of the samples with log-probs under a frozen model: the reference of KL terms, or the
    teacher of distillation. A scoring service writes it."""
    kl_loss: float = 0.0
    """Weight of the KL divergence from the reference in the loss."""
    kl_reward: float = 0.0
    """Weight of a rollout's KL divergence from the reference at sampling, summed over its tokens,
    in its reward."""
    kl_estimator: KLEstimator = "k3"
    """Estimator in the loss. k2: half the squared difference of log-probs; k3: as in GRPO."""
    kl_reward_estimator: KLEstimator = "k1"
    """Estimator in the reward. k1: the difference of log-probs, which gives the gradient of the KL;
    k2 and k3 have almost no gradient near the reference."""

    kl_beta: float = 0.1
    """beta of dpo and tba: reward per unit of KL divergence from the reference."""

    discount: float = 1.0
    """gamma of algorithms with a critic: discount of a reward per action."""
    gae_lambda: float = 0.95
    """lambda of generalised advantages: 1 uses rewards only, 0 the critic's next value."""
    value_weight: float = 0.5
    """Weight of the critic's squared error in the loss."""
    macro_action_tokens: int = 5
    """Tokens of an action of ma_ppo."""
    critic_learning_rate: float = 0.0
    """Learning rate of the critic's layer, initialised to 0; 0: thirty times learning_rate."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """After the warm-up: constant, or linear decay to 0 after the last step."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: int = 8192
    """Tokens of a forward pass on one rank, padding included. A longer sequence (for tba and dpo, a
    longer group) is not split but computed in a separate pass."""
    packing: bool = True
    """Compute sequences without padding and shared prefixes once, if the model supports it."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    cpu_offload: bool = False
    """Keep weights, gradients and AdamW's state on the host and copy weights to the device as
    needed; the optimizer step runs on the host."""
    lora_rank: int = 0
    """Train LoRA adapters of this rank on frozen weights; 0: train the weights. LoRA needs learning
    rates about ten times higher."""
    lora_alpha: float = 0.0
    """Adapters are scaled by lora_alpha / lora_rank; 0: by 2."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers with adapters, such as q_proj; none: all except the output layer.
    Experts stacked into one tensor have no adapters, and stay frozen."""
    seed: int = 0
    """Seed of everything random in the trainer."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of the computation and the published weights; bfloat16 keeps float32 master weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks: gloo on cpu, NCCL on cuda."""
    threads: int = 1
    """CPU threads of each rank."""

    checkpoint_every: int = 1
    """Steps between checkpoints; samples are committed with them. A checkpoint is written in the
    background, from a copy on the host."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep."""
    publish: Literal["weights", "adapter"] = "weights"
    """Publish whole weights, or the adapter only: rollout servers merge it into the model they
    started from, which must be this one."""
    publish_every: int = 1
    """Steps between published weight versions; the last step always publishes."""
    publish_phase_seconds: float = 600.0
    """Deadline of each phase of a publish: begin, write, commit. A publish that misses begin is
    postponed to the next step; one that misses write is retried until newer weights are due; a
    missed commit ends the process, which reads the newest version at its next start."""
    resume: bool = False
    """Resume from the newest checkpoint, if there is one. If false, an existing one is an error."""
    metrics_file: Path | None = None
    """JSON lines, one for each step."""
    dump_every: int = 0
    """Dump every Nth step to checkpoint_folder/dumps, for `python -m trainer.replay_step`; 0: none.
    A dump is as large as a checkpoint, and never deleted."""
    trackers: tuple[str, ...] = ()
    """tensorboard, wandb, mlflow, or plug-ins "package.module:Name"."""
    tracker_folder: Path | None = None
    """Local files of trackers; not set: `trackers` in the checkpoint folder."""
    tracker_project: str = "seamflow"
    """W&B's project, MLflow's experiment."""
    exit_when_finished: bool = False
    """Exit after the last step instead of serving GetStatus until a signal."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number above 0")
        for name in _NOT_NEGATIVE:
            if not (getattr(self, name) is None or getattr(self, name) >= 0):
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 or more")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number in [0, 1)")
        if not self.importance_floor < self.importance_cap < math.inf:
            raise ValueError(
                f"importance_cap is {self.importance_cap}: give a finite number above the "
                f"{self.importance_floor} of importance_floor"
            )
        for name in ("staleness_decay", "discount", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number in [0, 1]")
        if self.overlong_buffer_tokens > self.overlong_tokens:
            raise ValueError(
                f"overlong_buffer_tokens is {self.overlong_buffer_tokens}: give at most the "
                f"{self.overlong_tokens} of overlong_tokens"
            )
        self._check_reference()
        if self.publish == "adapter" and self.lora_rank == 0:
            raise ValueError("publish is 'adapter' but lora_rank is 0: there is none; give a rank")
        if self.lora_rank == 0 and (self.lora_targets or self.lora_alpha):
            name = "lora_targets" if self.lora_targets else "lora_alpha"
            raise ValueError(f"{name} is {getattr(self, name)!r} but lora_rank is 0: give a rank")
        if self.batch_min_groups > 1 and self.batch_timeout_seconds == 0:
            raise ValueError(
                f"batch_min_groups is {self.batch_min_groups} but batches are always whole: "
                "give batch_timeout_seconds too"
            )

    def _check_reference(self) -> None:
        for name in ("kl_loss", "kl_reward"):
            if getattr(self, name) and not self.reference_column:
                raise ValueError(
                    f"{name} is {getattr(self, name)} but reference_column is not set: give the "
                    "column with the reference's log-probs"
                )
        if self.kl_loss and self.kl_estimator == "k1":
            raise ValueError(
                f"kl_estimator is 'k1' with kl_loss {self.kl_loss}: its gradient is 0 on average; "
                "take k2, whose gradient is that of the KL, or k3"
            )

    @property
    def critic_rate_scale(self) -> float:
        """Learning rate of the critic's layer, relative to the others'."""
        return (self.critic_learning_rate or 30 * self.learning_rate) / self.learning_rate

    @property
    def tracking_folder(self) -> Path:
        """Folder of the trackers' local files."""
        return self.tracker_folder or self.checkpoint_folder / "trackers"

    def base(self) -> str:
        """Fingerprint of the frozen weights of an adapter; empty without one."""
        return fingerprint(self.model) if self.lora_rank else ""

    def reproducibility_settings(self) -> dict[str, Setting]:
        """The settings that determine the results of steps."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        # As decoded from JSON.
        values["lora_targets"] = list(self.lora_targets)
        return {name: values[name] for name in _REPRODUCIBILITY_SETTINGS}


_POSITIVE = (
    "num_steps",
    "gang_nodes",
    "batch_min_groups",
    "importance_cap",
    "advantage_epsilon",
    "kl_beta",
    "macro_action_tokens",
    "learning_rate",
    "max_grad_norm",
    "micro_batch_tokens",
    "threads",
    "checkpoint_every",
    "keep_checkpoints",
    "publish_every",
    "publish_phase_seconds",
)
_NOT_NEGATIVE = (
    "request_ahead_seconds",
    "batch_timeout_seconds",
    "clip_low",
    "clip_high",
    "stream_groups",
    "importance_floor",
    "loss_length",
    "overlong_buffer_tokens",
    "kl_loss",
    "kl_reward",
    "value_weight",
    "critic_learning_rate",
    "dump_every",
    "lora_rank",
    "lora_alpha",
    "warmup_steps",
    "weight_decay",
    "seed",
)
_REPRODUCIBILITY_SETTINGS = (
    "stream_groups",
    "algorithm",
    "reward",
    "shuffle_rewards",
    "clip_low",
    "clip_high",
    "importance",
    "importance_cap",
    "importance_floor",
    "staleness_decay",
    "advantage_epsilon",
    "loss_weights",
    "loss_length",
    "overlong_tokens",
    "overlong_buffer_tokens",
    "reference_column",
    "kl_loss",
    "kl_reward",
    "kl_estimator",
    "kl_reward_estimator",
    "kl_beta",
    "discount",
    "gae_lambda",
    "value_weight",
    "macro_action_tokens",
    "critic_learning_rate",
    "learning_rate",
    "learning_rate_schedule",
    "warmup_steps",
    "weight_decay",
    "beta1",
    "beta2",
    "max_grad_norm",
    "micro_batch_tokens",
    "packing",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "seed",
    "dtype",
)
