"""What a trainer can be told: table [trainer]."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from services.chassis.config.settings import ServerConfig
from services.lib.weight_files.folder_names import fingerprint

__all__ = ["ImportanceWay", "KLEstimator", "LossWeights", "Setting", "TrainerConfig"]

ImportanceWay = Literal["truncate", "mask", "icepop", "none"]
"""What becomes of the ratio of a token that other weights sampled."""
LossWeights = Literal["algorithm", "token_mean", "sequence_mean", "sequence_sum", "constant"]
"""What a token counts in the loss."""
KLEstimator = Literal["k1", "k2", "k3"]
"""How the distance from a reference is estimated from sampled tokens."""


Setting = str | int | float | bool | None | list[str]
"""A setting's value, as JSON has it."""


class TrainerConfig(ServerConfig):
    """Settings of one training gang; every rank reads the same file."""

    run_id: str
    """Training job; it exists already in the trajectory manager."""
    model: Path
    """Hugging Face folder of a causal language model: config, safetensors, tokenizer."""
    checkpoint_folder: Path
    """Where checkpoints are written; shared by all ranks."""

    trajectory_manager: str = "127.0.0.1:50051"
    """Address (host:port) of the SampleService."""
    weights: str = "127.0.0.1:50055"
    """Address of the WeightService."""
    scheduler: str | None = None
    """Address of the SchedulerService; without one the trainer keeps its device for itself."""
    gang_id: str = "trainer"
    """Names this gang to the scheduler."""
    gang_nodes: int = 1
    """Nodes the gang asks the scheduler for, all or none."""
    request_ahead_seconds: float = 30.0
    """Nodes are asked for before the batch is full, by what their way back takes but never more
    than this. 0: they are asked for when it is full."""

    batch_timeout_seconds: float = 0.0
    """After so long a wait a step is trained on the groups that are complete. Those that straggle
    stay for later steps, as long as max_staleness lets them. 0: batches are always whole."""
    batch_min_groups: int = 1
    """Fewer groups than this are waited for even then."""

    stream_groups: int = 0
    """A step begins when so many of its groups are complete, and goes on as the others come. 0:
    when all are."""

    num_steps: int = 100
    """Optimizer steps in all."""
    algorithm: str = "dapo"
    """Built-in algorithm, or "package.module:Name" of your own."""
    reward: str = "reward"
    """Name of the reward to train on."""
    shuffle_rewards: bool = False
    """Permute the rewards over a step's rollouts: a control experiment that must not learn."""
    clip_low: float | None = None
    """Trust region: no push below 1 - clip_low times the behaviour's probability. inf: none; not
    set: the algorithm's own."""
    clip_high: float | None = None
    """Trust region: no push above 1 + clip_high times the behaviour's probability. inf: none; not
    set: the algorithm's own."""
    importance: ImportanceWay = "truncate"
    """Weight of a token that other weights sampled, by its ratio: truncate it at importance_cap,
    mask tokens beyond it, icepop: mask those below importance_floor too, none: take no notice, as
    if nothing had been learned since, so that nothing is clipped either."""
    importance_cap: float = 2.0
    """Greatest importance weight of a token."""
    importance_floor: float = 0.5
    """Least ratio that icepop trains on."""
    staleness_decay: float = 1.0
    """A token weighs this much less for each version it is behind; 1: all alike."""
    advantage_epsilon: float = 1e-4
    """Added to the standard deviation of rewards."""
    loss_weights: LossWeights = "algorithm"
    """What a token counts: alike in the step, or in its rollout, or a rollout is one action, or by
    the constant loss_length. algorithm: as the algorithm's authors have it."""
    loss_length: int = 0
    """Tokens that a constant loss is divided by: the most that a rollout may sample."""
    overlong_tokens: int = 0
    """Rollouts with more trainable tokens lose 1 of their reward (DAPO's soft punishment); 0: no
    matter how many."""
    overlong_buffer_tokens: int = 0
    """The loss of reward begins so many tokens before that and grows linearly."""

    reference_column: str = ""
    """Column of the samples with log-probs under a frozen model: the reference of the KL terms, the
    teacher of distillation. A scoring service writes it."""
    kl_loss: float = 0.0
    """Weight of the distance from the reference in the loss."""
    kl_reward: float = 0.0
    """Weight of a rollout's distance from the reference, summed over its tokens as they were
    sampled, in its reward."""
    kl_estimator: KLEstimator = "k3"
    """Of the loss. k2: half the square of the difference of log-probs, k3: as in GRPO."""
    kl_reward_estimator: KLEstimator = "k1"
    """Of the reward. k1: the difference of log-probs, whose push is the gradient of the KL; k2 and
    k3 hardly push a policy that is near its reference."""

    kl_beta: float = 0.1
    """beta of dpo and tba: how much reward a unit of distance from the reference is worth."""

    discount: float = 1.0
    """gamma of algorithms with a critic: what a reward is worth an action earlier."""
    gae_lambda: float = 0.95
    """lambda of generalised advantages: 1 trusts rewards alone, 0 the critic."""
    value_weight: float = 0.5
    """Weight of the critic's squared error in the loss."""
    macro_action_tokens: int = 5
    """Tokens of an action of ma_ppo."""
    critic_learning_rate: float = 0.0
    """AdamW's of the critic's own layer, which begins at nothing; 0: thirty times learning_rate."""

    learning_rate: float = 1e-6
    """AdamW's, at its highest."""
    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """After the warm-up: stay, or fall linearly, to 0 for the step after the last one."""
    warmup_steps: int = 0
    """Steps over which the learning rate grows linearly to its value."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: int = 8192
    """Tokens of a forward pass on one rank, padding included. A sequence is never cut, nor is a
    group for tba and dpo: one that is longer is a pass of its own."""
    packing: bool = True
    """Sequences without padding, prefixes that they share computed once, where the model allows."""
    activation_checkpointing: bool = False
    """Keep what enters a block only, and compute the rest again: less memory, a third more time."""
    cpu_offload: bool = False
    """Keep weights, gradients and AdamW's state on the host, and bring to the device what is
    computed with; the optimizer step runs on the host."""
    lora_rank: int = 0
    """Train adapters of this rank beside frozen weights; 0: train the weights. Learning rates are
    about ten times higher with it."""
    lora_alpha: float = 0.0
    """An adapter counts lora_alpha / lora_rank times; 0: twice."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers that have one, such as q_proj; none: all but the output. Experts
    that are stacked into one tensor are no layers, and stay frozen."""
    seed: int = 0
    """Seeds everything random in the trainer."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of the computation and the published weights; bfloat16 keeps float32 master weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the ranks compute: gloo on cpu, NCCL on cuda."""
    threads: int = 1
    """CPU threads of each rank."""

    checkpoint_every: int = 1
    """Steps between durable checkpoints; samples are committed with them. One is written while
    training goes on, from a copy on the host."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    publish: Literal["weights", "adapter"] = "weights"
    """Whole weights, or the adapter alone: rollout servers add it to the model they started from,
    which is this one."""
    publish_every: int = 1
    """Steps between published weight versions; the last step always publishes."""
    publish_phase_seconds: float = 600.0
    """Deadline of each phase of a publish: begin, write, commit. One that misses begin is put off
    to the next step, one that misses write is tried again until newer weights are due; a missed
    commit ends the process, which asks at its next start."""
    resume: bool = False
    """Go on from the newest checkpoint, if there is one. Without it an existing one is an error."""
    metrics_file: Path | None = None
    """JSON lines, one for each step."""
    dump_every: int = 0
    """A step of so many is written down whole, in checkpoint_folder/dumps, for `python -m
    trainer.replay_step` to compute again; 0: none. Each is as large as a checkpoint; none
    is deleted."""
    trackers: tuple[str, ...] = ()
    """Besides: tensorboard, wandb, mlflow, or "package.module:Name" of your own."""
    tracker_folder: Path | None = None
    """What trackers write on this disk; not set: `trackers` in the checkpoint folder."""
    tracker_project: str = "seamflow"
    """W&B's project, MLflow's experiment."""
    exit_when_finished: bool = False
    """End the process after the last step instead of serving GetStatus until a signal."""

    @model_validator(mode="after")
    def _check(self) -> Self:
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
        return self

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
        """What trackers write on this disk."""
        return self.tracker_folder or self.checkpoint_folder / "trackers"

    def base(self) -> str:
        """Names the frozen weights that an adapter is added to; empty without one."""
        return fingerprint(self.model) if self.lora_rank else ""

    def reproducibility_settings(self) -> dict[str, Setting]:
        """The settings that decide what a step computes: two runs that differ here may differ."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        # As JSON gives it back.
        values["lora_targets"] = list(self.lora_targets)
        return {name: values[name] for name in _MATHEMATICS}


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
_MATHEMATICS = (
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
