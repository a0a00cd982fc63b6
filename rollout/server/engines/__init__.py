"""Implementations of the `Engine` protocol, and how one is chosen."""

from __future__ import annotations

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import Engine
from services.chassis import plugins

__all__ = ["ENGINES", "build_engine"]

ENGINES = {
    "torch": "rollout.server.engines.torch.torch_engine:TorchEngine",
    "sglang": "rollout.server.engines.sglang.sglang_engine:SGLangEngine",
    "fake": "rollout.server.engines.fake:FakeEngine",
}


def build_engine(config: RolloutServerConfig) -> Engine:
    """Make the engine `config.engine` names; `start` it before use.

    A plug-in "package.module:Name" is called as `Name(config)`. Raises `ConfigError`.
    """
    engine: Engine = plugins.make("engine", config.engine, ENGINES, config)
    return engine
