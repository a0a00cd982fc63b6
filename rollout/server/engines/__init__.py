"""Implementations of `rollout.server.engine.Engine`, one file each, and how one is chosen."""

from __future__ import annotations

from rollout.server.config import RolloutServerConfig
from rollout.server.engine import Engine
from services.chassis import plugins

__all__ = ["ENGINES", "build_engine"]

ENGINES = {
    "torch": "rollout.server.engines.torch:build",
    "sglang": "rollout.server.engines.sglang:build",
    "fake": "rollout.server.engines.fake:build",
}


def build_engine(config: RolloutServerConfig) -> Engine:
    """Make the engine `config.engine` names; `start` it before use.

    A plug-in "package.module:Name" is called as `Name(config)`. Raises `ConfigError`.
    """
    engine: Engine = plugins.make("engine", config.engine, ENGINES, config)
    return engine
