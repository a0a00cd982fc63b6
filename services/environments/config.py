"""Settings of the environments process, table [environments]."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from services.chassis.config.settings import ServerConfig


class EnvironmentsConfig(ServerConfig):
    """Settings of a process that runs episodes of an environment. Any number may serve one run."""

    run_id: str
    """Training job whose tasks it works on."""
    rollout_gateway: str = "127.0.0.1:50052"
    """Address of the rollout gateway; several as "ipv4:10.0.0.1:50052,10.0.0.2:50052"."""
    environment: str
    """Address of the environment server; several replicas as for the gateway do not work, since an
    episode lives in one of them: start a process for each."""
    environment_token: SecretStr | None = None
    """Bearer token of the environment server."""
    environment_tls_ca_file: Path | None = None
    """PEM file of the authority of the environment server's certificate, and of the reward
    server's; unset: `tls_ca_file`."""
    environment_plaintext: bool = False
    """Call both without TLS, although `tls_ca_file` is set."""
    reward_server: str | None = None
    """Address of a server of RewardService. Its rewards are added to those of the environment."""
    reward_token: SecretStr | None = None
    """Bearer token of the reward server."""
    http_gateway_url: str = ""
    """Start of the URLs at which self-driving environments call the policy, such as
    "http://127.0.0.1:8080"; empty: they use gRPC."""
    max_episodes: int = Field(32, ge=1)
    """Episodes that run concurrently; the environment's own limit applies too."""
    max_turns: int = Field(64, ge=1)
    """Turns of an episode; a longer one is cut off, and its rewards count."""
    reset_timeout_seconds: float = Field(300.0, gt=0)
    """Longest wait for the start of an episode, the wait for room included."""
    step_timeout_seconds: float = Field(60.0, gt=0)
    """Longest wait for the environment's answer to a message."""
    episode_timeout_seconds: float = Field(3600.0, gt=0)
    """Longest duration of an episode; then its rollout fails and is replaced."""
    temperature: float = Field(1.0, ge=0)
    """Softmax temperature of the policy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass of the policy."""
    max_new_tokens: int = Field(1024, ge=1)
    """Token budget of a turn."""
    seed: int = Field(0, ge=0)
    """From it, the task and the rollout's place in its group follow the seeds of episodes."""
    seed_per_task: bool = False
    """Give all rollouts of a task the same seed, so that they start from the same state."""
    reward_per_turn: bool = False
    """Give each turn the reward of its step; otherwise the rollout gets their sum."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        ca_file = self.environment_tls_ca_file
        if ca_file is not None and not ca_file.is_file():
            raise ValueError(f"environment_tls_ca_file is {str(ca_file)!r}, which does not exist")
        if ca_file is not None and self.environment_plaintext:
            raise ValueError(
                f"environment_tls_ca_file is {str(ca_file)!r} and environment_plaintext is true: "
                "give one of them"
            )
        return self
