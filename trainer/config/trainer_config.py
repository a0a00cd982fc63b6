"""Trainer settings, table [trainer]; nested tables hold the settings of one component each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from services.chassis.config.settings import ServerConfig
from services.lib.weight_files.folder_names import fingerprint
from trainer.config.operation import (
    BatchConfig,
    CheckpointConfig,
    GangConfig,
    PipelineConfig,
    PublishConfig,
    TrackingConfig,
)
from trainer.config.optimization import (
    AlgorithmConfig,
    KLConfig,
    LoRAConfig,
    OptimizerConfig,
)

Setting = str | int | float | bool | None | list[str]
"""A setting's value, as JSON represents it."""


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
    accept_lost_samples: bool = False
    """Go on from a checkpoint although the store has lost samples that it was trained on."""
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
    activation_checkpointing: bool | None = None
    """Keep only the input of each block and recompute the rest: less memory, a third more time.
    Unset: on cuda."""
    activation_offload: bool = False
    """Keep the inputs of the blocks on the host until the backward pass; with
    activation_checkpointing."""
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
    attention: Literal["auto", "varlen", "sdpa"] = "auto"
    """Kernel of attention within packed rows. varlen: FlashAttention of torch, on cuda in bfloat16,
    without padding; sdpa: torch's scaled dot-product attention on any device, rows of similar
    length together; auto: the first of them that device and type have."""
    replicas: int = Field(1, gt=0)
    """Copies of the models in the fsdp backend, each sharded over an equal share of the ranks
    (HSDP): a divisor of the number of ranks. With two or more, a rank that is killed costs no
    restart."""
    context_parallel: int = Field(1, gt=0)
    """Ranks that compute each micro-batch of packed rows together in the fsdp backend, a slice of
    its tokens each, for rows beyond the memory of one: a divisor of the ranks of a replica and of
    the model's attention heads."""
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
        self._check_rows()
        if self.activation_offload and not self.checkpoints_activations:
            raise ValueError(
                "activation_offload is true without activation_checkpointing: set that to true, or "
                "leave both out"
            )
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

    @property
    def checkpoints_activations(self) -> bool:
        """`activation_checkpointing`, or its default."""
        if self.activation_checkpointing is None:
            return self.device == "cuda"
        return self.activation_checkpointing

    def _check_rows(self) -> None:
        if self.batch.packing:
            if self.attention == "varlen" and (self.device, self.dtype) != ("cuda", "bfloat16"):
                raise ValueError(
                    f"attention is 'varlen' with device {self.device!r} and dtype {self.dtype!r}: "
                    "it needs 'cuda' and 'bfloat16'; set these, or attention to 'auto'"
                )
            return
        given = {
            "context_parallel": (self.context_parallel, 1),
            "attention": (self.attention, "auto"),
        }
        for name, (value, default) in given.items():
            if value != default:
                raise ValueError(
                    f"{name} is {value!r} with batch.packing false: it is for packed rows; set "
                    f"batch.packing to true, or {name} to {default!r}"
                )

    def _check_updates(self) -> None:
        if not self.algorithm.several_updates:
            return
        given = {
            "batch.stream_groups": self.batch.stream_groups,
            "batch.start_at_tail": self.batch.start_at_tail,
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
            "context_parallel": self.context_parallel if self.context_parallel > 1 else 0,
            # Stages are compared with the whole in float32.
            "attention": self.attention if self.attention == "varlen" else "",
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
        for name in (
            "stream_groups",
            "start_at_tail",
            "micro_batch_tokens",
            "packing",
            "replay_routed_experts",
        ):
            yield f"batch.{name}", getattr(self.batch, name)
        for name in ("seed", "dtype", "critic", "backend"):
            yield name, getattr(self, name)
        yield "critic_model", str(self.critic_model.resolve()) if self.critic_model else None
