"""Rollout server settings, table [rollout_server]."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from services.chassis.config.settings import ServerConfig


class RolloutServerConfig(ServerConfig):
    """Settings of a rollout server."""

    port: int = Field(50056, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    engine: str = "torch"
    """"torch", "sglang", "fake", or a plug-in as "package.module:Name"."""
    model: Path | None = None
    """Hugging Face folder the run starts from, version 0; the fake engine needs none."""
    run_id: str = "default"
    """Training job whose turns are served and whose weights are followed."""
    weights: str | None = None
    """Address of the weights service; unset: version 0 is served for the whole run."""
    cache_folder: Path | None = None
    """Folder of fetched weights, for this server alone; unset: a temporary folder."""
    weight_transports: tuple[str, ...] = ("shared_folder", "relay", "shard_stream")
    """Transports of new weights, in the order tried; each continues where the one before stopped:
    "shared_folder" (if a probe shows that this machine sees the weights service's folder under the
    same path), "relay" (once weight_relay_address is set), "shard_stream", or plug-ins as
    "package.module:Name"."""
    weight_relay_address: str | None = None
    """Address of this server for others, as "host:port". If set, rollout servers relay weights to
    each other and the weights service sends each file about once."""
    zone: str = Field("", pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    """Place of the server, such as a datacentre: servers of a zone relay weights to each other, so
    that about one copy of each file enters it. Empty: a zone of its own name."""
    weight_streams: int = Field(2, ge=1)
    """Files received concurrently from each sender."""
    weight_connections: int = Field(1, ge=1)
    """Connections to each sender of weights, over which the streams are spread: one carries no more
    than a TCP window in a round trip. At most weight_streams."""
    weight_encodings: tuple[Literal["zstd"], ...] = ()
    """Compression of weights on the network: "zstd"; none: the files' own bytes."""
    weight_fetch_seconds: float = Field(600.0, gt=0)
    """Deadline of one transport for one version; then the next transport continues."""
    weight_swap_seconds: float = Field(600.0, gt=0)
    """Deadline of the swap in the engine, its pause included; an engine that misses it counts as
    dead."""
    weight_update_at: Literal["token", "turn"] = "token"
    """Whether running turns swap weights at their next token or may end first."""
    server_id: str | None = None
    """Name recorded in every span, unique in the run; unset: host name and process id."""
    max_running: int = Field(64, ge=1)
    """Sequences sampled concurrently; more are queued."""
    max_context: int | None = None
    """Most tokens in one sequence; unset: what the model allows."""
    threads: int = Field(1, ge=1)
    """Threads of each tensor operation."""
    stream_interval: int = Field(8, ge=1)
    """Tokens of a sequence per message; fewer when 50 ms pass or the sequence ends, more if the
    caller requests a longer chunk interval."""
    prefill_tokens: int = Field(4096, ge=1)
    """Most prompt tokens the torch engine prefills between two steps."""
    torch_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Torch engine: dtype of weights and cache; "auto" is bfloat16 on a GPU, else float32."""
    torch_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Torch engine: device; "auto" takes a GPU if there is one."""
    record_routed_experts: bool = False
    """Of a mixture of experts: report which experts are chosen for each token, so that the trainer
    replays it; engines torch and sglang. They are stored with the tokens: layers times chosen
    experts are the bytes of a token (of 256 experts or more, twice as many)."""
    update_pause: Literal["retract", "abort", "in_place"] = "retract"
    """Running turns during a swap: retract (continue here, prefix prefilled again), abort (continue
    on any server), or in_place (keep the KV cache, part of which is then of older weights, so that
    log-probs belong to no version)."""
    sglang_command: tuple[str, ...] = ("python", "-m", "sglang.launch_server")
    """Command that starts SGLang in its own environment."""
    sglang_flags: tuple[str, ...] = Field(default=(), json_schema_extra={"flags": "sglang"})
    """Flags of SGLang, such as "--tp-size", "2"; as flags of this process: --sglang-tp-size 2."""
    sglang_url: str | None = None
    """URL of a running SGLang, on the same disk and used by this server alone; none is started. Its
    max_running, max_context and stream_interval are those it was started with."""
    num_gpus: int = Field(0, ge=0)
    """GPUs of this server, which launcher and chart assign. SGLang's tensor parallelism is over all
    of them, divided by the data and pipeline parallelism that sglang_flags may give; 0: as
    sglang_flags say."""
    lends_device: bool = False
    """Other workers of the node get the device at times, so that its memory must be released:
    SGLang is started with its memory saver, and refused without. Launcher and chart set it for
    nodes with other capability tags than rollout."""
    sglang_control_seconds: float = Field(300.0, gt=0)
    """Deadline of a call that changes what SGLang does; without an answer it counts as dead. It
    answers late while it compiles kernels."""
    sglang_drain_seconds: float = Field(300.0, gt=0)
    """Deadline of the end of all requests of SGLang at a pause; past it, it counts as dead."""
    sglang_broadcast_host: str | None = None
    """Address of this host for an SGLang on another host: weights are then broadcast to it by
    torch.distributed (NCCL on GPUs) instead of being read from the same disk."""
    sglang_weights: Literal["disk", "tensors"] = "disk"
    """How an SGLang on this host gets new weights: it reads the files, or takes their tensors
    through shared memory, a part of 512 MB at a time. If that fails, it reads the files."""
    fake_step_seconds: float = Field(0.0, ge=0)
    """Fake engine: time from one token to the next."""
    fake_mean_tokens: int = Field(64, ge=0)
    """Fake engine: mean length of an output; 0: outputs end at max_new_tokens only."""
    fake_vocab_size: int = Field(1024, ge=2)
    """Fake engine: number of token ids."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(f"max_context is {self.max_context}: must be at least 2")
        if self.weight_connections > self.weight_streams:
            raise ValueError(
                f"weight_connections is {self.weight_connections}, weight_streams "
                f"{self.weight_streams}: a connection needs a stream; raise weight_streams"
            )
        return self
