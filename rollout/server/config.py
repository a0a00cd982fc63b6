"""Settings of a rollout server, table [rollout_server]."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.chassis.config.load import ServerConfig

__all__ = ["RolloutServerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutServerConfig(ServerConfig):
    """Settings of one rollout server and its engine."""

    port: int = 50056
    """gRPC port; 0 takes a free one."""
    engine: str = "torch"
    """"torch", "sglang", "fake", or a plug-in as "package.module:Name"."""
    model: Path | None = None
    """Hugging Face folder of weight version 0; the fake engine needs none."""
    run_id: str = "default"
    """Training job whose turns are served and whose weights are watched."""
    model_name: str = "policy"
    """Name under which the weights service knows the model."""
    weights: str | None = None
    """Address of the weights service; None: only version 0 is served."""
    cache_folder: Path | None = None
    """Cache of fetched weights, used by this server only; None: a temporary folder."""
    weight_transports: tuple[str, ...] = ("shared_folder", "relay", "shard_stream")
    """Weight transports in the order tried; each continues from what the previous one verified:
    "shared_folder" (once weight_folder is set), "relay" (once weight_relay_address is set),
    "shard_stream", or plug-ins as "package.module:Name"."""
    weight_folder: Path | None = None
    """Mount point of the weights service's folder on this machine; None: not mounted."""
    weight_folder_check: Literal["size", "sha256"] = "size"
    """What is verified of a shared file; the weights service verified its SHA-256 at the commit."""
    weight_relay_address: str | None = None
    """Address of this server for other rollout servers, as "host:port". If set, servers relay
    weights to each other and the weights service sends each file about once."""
    weight_streams: int = 2
    """Files received concurrently."""
    weight_encodings: tuple[str, ...] = ()
    """Accepted encodings of shards: "zstd", "delta" (difference from the version before, small
    where few 16-bit words changed)."""
    weight_fetch_seconds: float = 600.0
    """Deadline of one transport for one version; then the next one continues."""
    weight_prepare_seconds: float = 300.0
    """Deadline of reading a version into host memory; after it the swap reads from disk."""
    weight_swap_seconds: float = 300.0
    """Deadline of the engine for the swap; one that misses it counts as failed."""
    weight_update_order: Literal["at_once", "rolling"] = "at_once"
    """Whether servers of a run swap concurrently, or a few at a time (rolling_servers of the
    weights service)."""
    weight_update_at: Literal["token", "turn"] = "token"
    """Swap at the next token, or after the running turns have ended."""
    weight_wait_seconds: float = 30.0
    """Timeout of waiting for running turns, and of waiting for a slot in a rolling update."""
    server_id: str | None = None
    """Name stamped on every span, unique in the run; by default host name and process id."""
    max_running: int = 64
    """Sequences sampled concurrently; more wait."""
    max_context: int | None = None
    """Limit of tokens in one sequence; None: the model's limit."""
    threads: int = 1
    """Threads of each tensor operation."""
    stream_interval: int = 8
    """Tokens of a sequence in one message; fewer when 50 ms pass or the sequence ends, more if the
    agent set a chunk interval."""
    prefill_tokens: int = 4096
    """Torch engine: limit of prompt tokens prefilled between two steps."""
    torch_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Torch engine: type of weights and cache; "auto" is bfloat16 on a GPU, else float32."""
    torch_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Torch engine: device; "auto" uses a GPU if there is one."""
    update_pause: Literal["retract", "abort", "in_place"] = "retract"
    """Turns during a swap: "retract" prefills them again here, "abort" lets them continue on any
    server, "in_place" keeps their KV cache, so that their later log-probs are of no single
    version."""
    sglang_command: tuple[str, ...] = ("python", "-m", "sglang.launch_server")
    """Command that starts SGLang, in a separate environment."""
    sglang_flags: tuple[str, ...] = field(default=(), metadata={"flags": "sglang"})
    """Flags of SGLang, such as "--tp-size", "2"; as flags of this process: --sglang-tp-size 2."""
    sglang_url: str | None = None
    """A running SGLang to use instead of starting one. It must serve no other client and see the
    same files; its own max_running, max_context and stream_interval apply."""
    sglang_broadcast_host: str | None = None
    """Address of this host for an SGLang on another one: weights are broadcast by torch.distributed
    (NCCL on GPUs) instead of being read from a shared disk."""
    fake_step_seconds: float = 0.0
    """Fake engine: time from one token to the next."""
    fake_mean_tokens: int = 64
    """Fake engine: mean length of an output; 0: only max_new_tokens ends one."""
    fake_vocab_size: int = 1024
    """Fake engine: number of token ids."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for settings that no engine can use."""
        for name in ("max_running", "threads", "stream_interval", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
        self._check_weights()
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(f"max_context is {self.max_context}: must be at least 2")
        if self.fake_step_seconds < 0 or self.fake_mean_tokens < 0 or self.fake_vocab_size < 2:
            raise ValueError("fake_*: seconds and tokens are at least 0, the vocabulary at least 2")

    def _check_weights(self) -> None:
        if self.weight_streams < 1:
            raise ValueError(f"weight_streams is {self.weight_streams}: must be at least 1")
        for name in ("fetch", "prepare", "swap", "wait"):
            seconds = getattr(self, f"weight_{name}_seconds")
            if seconds <= 0:
                raise ValueError(f"weight_{name}_seconds is {seconds}: must be above 0")
        for encoding in self.weight_encodings:
            if encoding not in ("zstd", "delta"):
                raise ValueError(f"weight_encodings has {encoding!r}: must be of zstd, delta")
