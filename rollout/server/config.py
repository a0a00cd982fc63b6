"""What a rollout server can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.chassis.config.load import ServerConfig

__all__ = ["RolloutServerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutServerConfig(ServerConfig):
    """Configuration of one rollout server; table [rollout_server]."""

    port: int = 50056
    """gRPC port; 0 takes a free one."""
    engine: str = "torch"
    """"torch", "sglang", "fake", or a plug-in as "package.module:Name"."""
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
    weight_transports: tuple[str, ...] = ("shared_folder", "relay", "shard_stream")
    """What brings new weights, in the order tried; each goes on from what the one before verified:
    "shared_folder" (once weight_folder is set), "relay" (once weight_relay_address is set),
    "shard_stream", or plug-ins as "package.module:Name"."""
    weight_folder: Path | None = None
    """Where the weights service's folder is seen on this machine; without it nothing is shared."""
    weight_folder_check: Literal["size", "sha256"] = "size"
    """What of a shared file is checked; the weights service has checked all of it at the commit."""
    weight_relay_address: str | None = None
    """Where other rollout servers reach this one, as "host:port"; set, they send each other weights
    and the weights service sends each file about once."""
    weight_streams: int = 2
    """Files received at the same time."""
    weight_encodings: tuple[str, ...] = ()
    """How weights may be made smaller for the network: "zstd", "delta" (against the version before,
    where few 16-bit words changed)."""
    weight_fetch_seconds: float = 600.0
    """Deadline of one transport for one version; then the next one goes on."""
    weight_prepare_seconds: float = 300.0
    """Deadline of reading a version into host memory; then it is loaded without."""
    weight_swap_seconds: float = 300.0
    """Deadline of the engine for the change itself; one that misses it counts as dead."""
    weight_update_order: Literal["at_once", "rolling"] = "at_once"
    """Whether servers of a run change weights at once, or a few at a time (rolling_servers of the
    weights service)."""
    weight_update_at: Literal["token", "turn"] = "token"
    """Whether turns change weights at their next token, or those that run may end first."""
    weight_wait_seconds: float = 30.0
    """Longest wait for running turns to end, and for a place in a rolling update."""
    server_id: str | None = None
    """Name stamped on every span, unique in the run; by default host name and process id."""
    max_running: int = 64
    """Sequences sampled at the same time; more wait."""
    max_context: int | None = None
    """Most tokens in one sequence; by default what the model allows."""
    threads: int = 1
    """Threads of each tensor operation."""
    stream_interval: int = 8
    """Tokens of a sequence sent in one message; fewer when 50 ms pass or the sequence ends, more
    where an agent asks for them less often."""
    prefill_tokens: int = 4096
    """Most prompt tokens the torch engine prefills between two steps."""
    torch_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Torch engine: type of weights and cache; "auto" is bfloat16 on a GPU, else float32."""
    torch_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Torch engine: where it computes; "auto" takes a GPU if there is one."""
    update_pause: Literal["retract", "abort", "in_place"] = "retract"
    """What happens to turns while new weights are loaded: they go on here from their tokens; or on
    any server; or here with their KV cache, of which part then is of older weights, so that their
    log-probs are those of no version."""
    sglang_command: tuple[str, ...] = ("python", "-m", "sglang.launch_server")
    """What starts SGLang, in an environment of its own."""
    sglang_flags: tuple[str, ...] = field(default=(), metadata={"flags": "sglang"})
    """Flags of SGLang, such as "--tp-size", "2"; as flags of this process: --sglang-tp-size 2."""
    sglang_url: str | None = None
    """SGLang that runs already, for nobody else and with the same files; none is started then.
    Its max_running, max_context and stream_interval are those it was started with."""
    sglang_broadcast_host: str | None = None
    """Where SGLang, on another host, reaches this one: weights are then broadcast to it by
    torch.distributed (NCCL where there are GPUs) instead of being read from the same disk."""
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
