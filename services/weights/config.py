"""Weights service settings, table [weights]."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from services.chassis.config.settings import ServerConfig


class WeightsConfig(ServerConfig):
    """Settings of the weights service."""

    port: int = Field(50055, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    folder: Path
    """Where versions are kept, as `<run>/<model>/weight_v000001/`; shared by all replicas."""
    offer_folder: bool = True
    """Whether trainers and rollout servers that see the same folder, under the same path, may use
    it instead of sending files; they find out by a probe."""
    redis_url: SecretStr
    """Store of versions and manifests, such as redis://:password@host:6379/0."""
    keep_versions: int = Field(4, ge=1)
    """Newest committed versions whose files are kept; older ones are deleted after each commit."""
