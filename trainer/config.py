"""Trainer settings, table [trainer]; nested tables hold the settings of one component each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from services.chassis.config.settings import ServerConfig, Settings
from services.lib.weight_files.folder_names import fingerprint

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "GangConfig",
    "ImportanceMode",
    "KLConfig",
    "KLEstimator",
    "LoRAConfig",
    "LossAggregation",
    "OptimizerConfig",
    "PipelineConfig",
    "PublishConfig",
    "Setting",
    "TrackingConfig",
    "TrainerConfig",
]

ImportanceMode = Literal["truncate", "mask", "icepop", "none"]
"""Treatment of the importance ratio of a token that older weights sampled."""
LossAggregation = Literal["algorithm", "token_mean", "sequence_mean", "sequence_sum", "constant"]
"""How token losses are averaged."""
KLEstimator = Literal["k1", "k2", "k3"]
"""Estimator of the distance from a reference, from sampled tokens."""
Setting = str | int | float | bool | None | list[str]
"""A setting's value, as JSON represents it."""

Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
ClipRange = Annotated[float, Field(ge=0)]


class GangConfig(Settings):
    """Nodes that the trainer requests from the scheduler."""

    id: str = "trainer"
    """Name of the gang."""
    nodes: int = Field(1, gt=0)
    """Nodes requested, all or none."""
    node_id: str = ""
    """Node that this rank runs on, as its node agent names it. With it the ranks' nodes and no
    others are requested; several nodes need it, one in the environment of each."""
    request_ahead_seconds: float = Field(30.0, ge=0)
    """Request nodes before the batch is full, by the measured time of their return, at most this
    much. 0: request them when it is full."""


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
    """Tokens of a forward pass on one rank, padding included. A longer sequence, or group for tba
    and dpo, is a pass by itself."""
    max_rejected_groups: int = Field(64, ge=0)
    """A group that cannot be trained is replaced; after more than this many in a row the trainer
    ends, since all agents err. 0: at the first."""
    trial_deliveries: int = Field(3, ge=0)
    """When the trainer starts with a step that this many trainers got and none committed, it tries
    the step's groups one by one and replaces one that ends the process. 0: never."""
    packing: bool = True
    """Compute sequences without padding and shared prefixes once, where the model allows it."""


class AlgorithmConfig(Settings):
    """The reinforcement-learning algorithm: advantages, importance ratios, loss."""

    name: str = "dapo"
    """Built-in algorithm (docs/algorithms.md), or "package.module:Name"."""
    reward: str = ""
    """Name of the reward to train on; unset: "reward", or the only one that a rollout has."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of several named rewards, such as {correct = 1.0, format = 0.2}: their sum is trained
    on and recorded as `reward`. One that a rollout lacks counts 0."""
    reference_column: str = ""
    """Column with log-probs under a frozen model: the reference of the KL terms, tba and dpo, or
    the teacher of distillation. A scoring service writes it."""
    shuffle_rewards: bool = False
    """Permute the rewards over a step's rollouts: a control experiment that must not learn."""
    clip_low: ClipRange | None = None
    """Trust region: no gradient below ratio 1 - clip_low. inf: none; unset: the algorithm's."""
    clip_high: ClipRange | None = None
    """Trust region: no gradient above ratio 1 + clip_high. inf: none; unset: the algorithm's."""
    importance: ImportanceMode = "truncate"
    """Importance ratios of tokens that older weights sampled: truncate them at importance_cap, mask
    tokens beyond it, icepop: mask those below importance_floor too, none: ratio 1, no clipping."""
    importance_cap: float = Field(2.0, gt=0, allow_inf_nan=False)
    """Greatest importance ratio of a token."""
    importance_floor: float = Field(0.5, ge=0)
    """Least ratio that icepop trains on."""
    staleness_decay: Share = 1.0
    """Factor on a token's weight for each version it is behind; 1: none."""
    advantage_epsilon: float = Field(1e-4, gt=0)
    """Added to the standard deviation of rewards."""
    loss_aggregation: LossAggregation = "algorithm"
    """Average token losses over the step, over each rollout, sum them per rollout, or divide by the
    constant loss_length. algorithm: as published with the algorithm."""
    loss_length: int = Field(0, ge=0)
    """Divisor of the constant aggregation: the most tokens that a rollout may sample."""
    overlong_tokens: int = Field(0, ge=0)
    """Rollouts with more trainable tokens lose 1 of their reward (DAPO's soft penalty); 0: off."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """Tokens before overlong_tokens over which that penalty grows linearly."""
    beta: float = Field(0.1, gt=0)
    """beta of dpo and tba: reward per unit of distance from the reference."""
    discount: Share = 1.0
    """gamma of algorithms with a critic: value of a reward one action earlier."""
    gae_lambda: Share = 0.95
    """lambda of generalised advantages: 1 trusts rewards alone, 0 the critic."""
    value_weight: float = Field(0.5, ge=0)
    """Weight of the critic's squared error in the loss."""
    macro_action_tokens: int = Field(5, gt=0)
    """Tokens of an action of ma_ppo."""
    num_epochs: int = Field(1, gt=0)
    """Times that a step trains on its batch."""
    num_mini_batches: int = Field(1, gt=0)
    """Parts of whole groups into which each epoch cuts the batch, with an update after each. With
    more than one update the proximal policy, whose trust region holds, and the critic's values are
    those at the begin of the step."""
    critic_learning_rate: float = Field(0.0, ge=0)
    """Learning rate of the critic; 0: that of the optimizer for a model, thirty times that for a
    layer."""

    @property
    def several_updates(self) -> bool:
        """Whether a step updates the weights more than once."""
        return self.num_epochs * self.num_mini_batches > 1

    @property
    def trained_reward(self) -> str:
        """Name of the trained reward in metrics."""
        return self.reward or "reward"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.importance_floor < self.importance_cap:
            raise ValueError(
                f"importance_cap is {self.importance_cap}: give a number above the "
                f"{self.importance_floor} of importance_floor"
            )
        if self.overlong_buffer_tokens > self.overlong_tokens:
            raise ValueError(
                f"overlong_buffer_tokens is {self.overlong_buffer_tokens}: give at most the "
                f"{self.overlong_tokens} of overlong_tokens"
            )
        return self


class KLConfig(Settings):
    """Distance from the frozen model of algorithm.reference_column."""

    loss: float = Field(0.0, ge=0)
    """Weight of the distance in the loss."""
    reward: float = Field(0.0, ge=0)
    """Weight of a rollout's distance, summed over its sampled tokens, in its reward."""
    estimator: KLEstimator = "k3"
    """Estimator in the loss. k2: half the squared difference of log-probs; k3: as in GRPO."""
    reward_estimator: KLEstimator = "k1"
    """Estimator in the reward. k1: the difference of log-probs, whose gradient is that of the KL;
    k2 and k3 hardly act on a policy near its reference."""


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(1e-6, gt=0)
    """Highest learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or along a line or half a cosine to final_share for the step
    after the last one."""
    final_share: Share = 0.0
    """Share of the learning rate at which linear and cosine end."""
    warmup_steps: int = Field(0, ge=0)
    """First steps, over which the learning rate grows linearly."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    beta1: Decay = 0.9
    """Decay of the mean gradient."""
    beta2: Decay = 0.95
    """Decay of the mean squared gradient."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm; the metric grad_scale is below 1 where they were."""


class LoRAConfig(Settings):
    """Low-rank adapters on frozen weights."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0: train the weights. Learning rates are about ten times higher."""
    alpha: float = Field(0.0, ge=0)
    """Adapters are scaled by alpha / rank; 0: twice the rank."""
    targets: tuple[str, ...] = ()
    """Names of linear layers that get one, such as q_proj; none: all but the output. Experts that
    are stacked into one tensor stay frozen."""


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
    plan_seconds: float = Field(2.0, gt=0)
    """CPU seconds of the search for a fused schedule, for each number of micro-batches."""


class CheckpointConfig(Settings):
    """Durable checkpoints, written while training continues."""

    folder: Path
    """Folder of the checkpoints, shared by all ranks."""
    every: int = Field(1, gt=0)
    """Steps between checkpoints; samples are committed with them."""
    keep: int = Field(2, gt=0)
    """Newest checkpoints that are kept."""
    dump_every: int = Field(0, ge=0)
    """Dump every Nth step to folder/dumps for `python -m trainer.replay_step`; 0: none. A dump is
    as large as a checkpoint; none is deleted."""


class PublishConfig(Settings):
    """Published weight versions."""

    content: Literal["weights", "adapter"] = "weights"
    """Whole weights, or the LoRA adapter alone, which rollout servers add to the initial model."""
    every: int = Field(1, gt=0)
    """Steps between versions; the last step always publishes."""
    phase_seconds: float = Field(600.0, gt=0)
    """Deadline of each phase: begin, write, upload, commit. A missed begin defers the publish to
    the next step, a missed write or upload is continued until newer weights are due, a missed
    commit ends the process, which asks for the outcome at its next start."""
    find_folder: bool = True
    """Write into the weights service's folder if a probe shows that this machine sees it under the
    same path; else weights are uploaded."""
    upload_folder: Path | None = None
    """Holds a version while it is uploaded, for this trainer alone; unset: `upload` in the
    checkpoint folder."""
    compress: bool = False
    """Compress uploaded weights (Zstandard), for a slow network."""


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
    and trackers; 0: none."""
    num_samples: int = Field(4, ge=1)
    """Samples of such a table."""
    samples_file: Path | None = None
    """JSON lines, one per sample of those tables."""


class TrainerConfig(ServerConfig):
    """Settings of a trainer; every rank reads the same file."""

    run_id: str
    """Training job; it exists already in the trajectory manager."""
    model: Path
    """Hugging Face folder of a causal language model: config, safetensors, tokenizer."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Address of the trajectory manager, which leases samples."""
    weights: str = "127.0.0.1:50055"
    """Address of the weights service."""
    scheduler: str | None = None
    """Address of the scheduler; unset: the trainer keeps its device for itself."""
    num_steps: int = Field(100, gt=0)
    """Optimizer steps of the whole run."""
    resume: bool = False
    """Continue from the newest checkpoint, if there is one. Without it an existing one is an
    error."""
    end_run: bool = True
    """End the run after the last step: agents get no more tasks, and learn why."""
    exit_when_finished: bool = False
    """End the process after the last step instead of serving GetStatus until a signal."""
    seed: int = Field(0, ge=0)
    """Seed of everything random in the trainer."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Floating-point type of the computation and the published weights; bfloat16 keeps float32
    master weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks: gloo on cpu, NCCL on cuda."""
    threads: int = Field(1, gt=0)
    """CPU threads of each rank."""
    activation_checkpointing: bool = False
    """Keep only the input of each block and recompute the rest: less memory, a third more time."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state on the host and copy to the device what is
    computed with; the optimizer step runs on the host."""
    critic: Literal["layer", "model"] = "layer"
    """Critic of algorithms that have one: a layer on the policy's last hidden states, or a model of
    its own, with its own gradient norm. It is in the checkpoints and never published."""
    critic_model: Path | None = None
    """Hugging Face folder that the critic's own model starts from; unset: the policy's."""
    backend: Literal["fsdp", "pipeline"] = "fsdp"
    """How the models are spread over the ranks: sharded, each rank computing whole models on
    samples of its own, or cut into stages, which pass micro-batches on. A pipeline moves
    activations between ranks instead of weights, which suits slow networks."""
    replicas: int = Field(1, gt=0)
    """Copies of the models in the fsdp backend, each sharded over an equal share of the ranks
    (HSDP): a divisor of the number of ranks. With two or more, a rank that is killed costs no
    restart."""
    pipeline: PipelineConfig = PipelineConfig()
    """The pipeline backend."""
    gang: GangConfig = GangConfig()
    """Nodes requested from the scheduler."""
    batch: BatchConfig = BatchConfig()
    """Groups of a step and their micro-batches."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages, importance ratios and loss."""
    kl: KLConfig = KLConfig()
    """Distance from a reference model."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""
    lora: LoRAConfig = LoRAConfig()
    """Adapters."""
    checkpoint: CheckpointConfig
    """Checkpoints."""
    publish: PublishConfig = PublishConfig()
    """Weight versions."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics and trackers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_kl()
        self._check_lora()
        self._check_critic()
        self._check_pipeline()
        self._check_updates()
        if self.batch.start_at_tail and self.scheduler is None:
            raise ValueError(
                "batch.start_at_tail is true but scheduler is not set, which computes when the "
                "tail begins: give its address, or set stream_groups instead"
            )
        if self.batch.min_groups > 1 and self.batch.timeout_seconds == 0:
            raise ValueError(
                f"batch.min_groups is {self.batch.min_groups} but batches are always whole: "
                "give batch.timeout_seconds too"
            )
        return self

    def _check_updates(self) -> None:
        if not self.algorithm.several_updates:
            return
        given = {
            "batch.stream_groups": self.batch.stream_groups,
            "batch.start_at_tail": self.batch.start_at_tail,
            "checkpoint.dump_every": self.checkpoint.dump_every,
        }
        for name, value in given.items():
            if value:
                raise ValueError(
                    f"{name} is {value} with algorithm.num_epochs {self.algorithm.num_epochs} and "
                    f"num_mini_batches {self.algorithm.num_mini_batches}: set it to "
                    f"{type(value)()}, or train with one update for each step"
                )

    def _check_kl(self) -> None:
        for name in ("loss", "reward"):
            if getattr(self.kl, name) and not self.algorithm.reference_column:
                raise ValueError(
                    f"kl.{name} is {getattr(self.kl, name)} but algorithm.reference_column is not "
                    "set: give the column with the reference's log-probs"
                )
        if self.kl.loss and self.kl.estimator == "k1":
            raise ValueError(
                f"kl.estimator is 'k1' with kl.loss {self.kl.loss}: its gradient is 0 on average; "
                "use k2, whose gradient is that of the KL, or k3"
            )

    def _check_critic(self) -> None:
        if self.critic_model is not None and self.critic != "model":
            raise ValueError(
                f"critic_model is {self.critic_model} but critic is 'layer': set critic to "
                "'model', or remove critic_model"
            )
        if self.critic == "model" and self.lora.rank:
            raise ValueError(
                f"critic is 'model' with lora.rank {self.lora.rank}: adapters are for a critic "
                "that is a layer; set critic to 'layer' or lora.rank to 0"
            )

    def _check_pipeline(self) -> None:
        if self.backend == "fsdp":
            if self.pipeline != PipelineConfig():
                raise ValueError(
                    "[pipeline] has settings but backend is 'fsdp': set backend to 'pipeline', or "
                    "remove them"
                )
            return
        self._refuse_in_a_pipeline()
        if self.pipeline.critic_stages and self.critic != "model":
            raise ValueError(
                f"pipeline.critic_stages is {self.pipeline.critic_stages} but critic is 'layer', "
                "which is on the policy's last stage: set critic to 'model'"
            )
        if self.pipeline.micro_batches_held == 1 and self.critic == "model":
            raise ValueError(
                "pipeline.micro_batches_held is 1 but a rank has stages of two models: give 2 or "
                "more"
            )

    def _refuse_in_a_pipeline(self) -> None:
        given = {
            "lora.rank": self.lora.rank,
            "cpu_offload": self.cpu_offload,
            "replicas": self.replicas if self.replicas > 1 else 0,
        }
        for name, value in given.items():
            if value:
                raise ValueError(
                    f"{name} is {value!r} with backend 'pipeline', which cannot do that: remove "
                    "it, or set backend to 'fsdp'"
                )

    def _check_lora(self) -> None:
        if self.lora.rank:
            return
        if self.publish.content == "adapter":
            raise ValueError("publish.content is 'adapter' but lora.rank is 0: give a rank")
        for name in ("targets", "alpha"):
            if value := getattr(self.lora, name):
                raise ValueError(f"lora.{name} is {value!r} but lora.rank is 0: give a rank")

    @property
    def critic_rate_scale(self) -> float:
        """Learning rate of the critic, relative to the policy's."""
        rate = self.optimizer.learning_rate
        unset = rate if self.critic == "model" else 30 * rate
        return (self.algorithm.critic_learning_rate or unset) / rate

    @property
    def tracking_folder(self) -> Path:
        """Folder that trackers write to."""
        return self.tracking.folder or self.checkpoint.folder / "trackers"

    @property
    def upload_folder(self) -> Path:
        """Folder that holds a version while it is uploaded."""
        return self.publish.upload_folder or self.checkpoint.folder / "upload"

    def base(self) -> str:
        """Fingerprint of the frozen weights that an adapter belongs to; empty without one."""
        return fingerprint(self.model) if self.lora.rank else ""

    def reproducibility_settings(self) -> dict[str, Setting]:
        """The settings that decide what a step computes: runs that differ here may differ."""
        return dict(self._numerical())

    def _numerical(self) -> Iterator[tuple[str, Setting]]:
        for name in ("algorithm", "kl", "optimizer", "lora"):
            values = getattr(self, name).model_dump(mode="json")
            yield from ((f"{name}.{key}", value) for key, value in values.items())
        for name in ("stream_groups", "start_at_tail", "micro_batch_tokens", "packing"):
            yield f"batch.{name}", getattr(self.batch, name)
        for name in ("seed", "dtype", "critic", "backend"):
            yield name, getattr(self, name)
        yield "critic_model", str(self.critic_model.resolve()) if self.critic_model else None
