"""Rollout gateway settings, table [rollout_gateway]."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator
from seamflow.channel import MAX_MESSAGE_BYTES

from rollout.gateway import limits
from services.chassis.config.settings import ServerConfig
from services.lib.decode_latency import DecodeLatency
from services.lib.rendering.renderer import RenderLimits


class GatewayConfig(ServerConfig):
    """Settings of a rollout gateway. Any number of gateways may serve one run."""

    run_id: str
    """Training job whose rollout servers this gateway uses."""
    model: Path
    """Hugging Face folder with the tokenizer and the chat template."""
    response_format: str = "auto"
    """How answers are parsed into content, reasoning and tool calls: auto (the tokenizer's response
    template, else by the markers in its chat template), hermes (also Qwen 2.5 and 3), qwen3_coder,
    llama3, mistral, mistral_args (Mistral from 2025 on), deepseek, harmony (gpt-oss), reasoning,
    text, or a response template of one's own: a .json file, or a dict "package.module:NAME"."""
    history: Literal["as_template", "as_sampled"] = "as_template"
    """Where the chat template rewrites earlier messages, such as dropping old reasoning:
    as_template renders the whole conversation again, as_sampled keeps the recorded tokens."""
    credential_secret: SecretStr | None = None
    """Key from which credentials are derived, the same for all gateways of a run; unset: random."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Address of the trajectory manager, which records tokens."""
    scheduler: str | None = None
    """Address of the scheduler, which lists rollout servers; unset: only `servers` are used."""
    servers: tuple[str, ...] = ()
    """Rollout servers in addition to the scheduler's, as host:port."""
    weights: str | None = None
    """Address of the weights service, which announces committed versions; unset: any version a
    server reports is allowed."""
    max_version_lag: int = Field(1, ge=0)
    """Versions a server may be behind the newest committed one and still get turns."""
    dispatch: str = "least_load"
    """Dispatch policy: least_load, prefix_affinity, cache_first, longest_first, skew_aware, or
    "package.module:Name"."""
    decode_latency: Mapping[str, float] = Field(default={})
    """Seconds of a decode step by batch size, for skew_aware: {1 = 0.0085, ...}. Empty: learned
    from the load that servers report."""
    lengths: str = "running_means"
    """Estimator of rollout lengths: running_means, ranker, or "package.module:Name"."""
    ranker: str | None = None
    """Address of the ranker, for lengths = "ranker"."""
    max_waiting_turns: int = Field(16_384, ge=1)
    """Turns that may wait for a server; more are refused with RESOURCE_EXHAUSTED."""
    max_request_bytes: int = Field(8 << 20, ge=1 << 16, le=MAX_MESSAGE_BYTES)
    """Largest request of an agent, as gRPC receives it; larger ones end with RESOURCE_EXHAUSTED."""
    max_prompt_tokens: int = Field(1 << 20, ge=1)
    """Tokens of a prompt; the engines' context is a limit of its own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.server_latency()
        if (self.lengths == "ranker") != (self.ranker is not None):
            raise ValueError(
                f"lengths is {self.lengths!r} and ranker is {self.ranker!r}: "
                'for the ranker give its address and lengths = "ranker", else neither'
            )
        return self

    @property
    def render_limits(self) -> RenderLimits:
        return RenderLimits(limits.MAX_RENDER_SECONDS, limits.MAX_RENDER_BYTES)

    def server_latency(self) -> DecodeLatency | None:
        return DecodeLatency.from_table(self.decode_latency) if self.decode_latency else None
