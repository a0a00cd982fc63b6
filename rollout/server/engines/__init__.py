"""Implementations of `rollout.server.engine.Engine`, one file each, and how one is chosen."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from rollout.server.config import RolloutServerConfig
from rollout.server.engine import Engine
from services.chassis import plugins
from services.chassis.errors import ConfigError

__all__ = ["ENGINES", "build_engine"]

# Paths, not imports: only the engine that is asked for loads its libraries.
ENGINES = {
    "torch": "rollout.server.engines.torch:build",
    "sglang": "rollout.server.engines.sglang:build",
    "fake": "rollout.server.engines.fake:build",
}


def build_engine(config: RolloutServerConfig) -> Engine:
    """Make the engine `config.engine` names; `start` it before use.

    A plug-in "package.module:Name" is called as `Name(config)`. Raises `ConfigError`.
    """
    path = ENGINES.get(config.engine, config.engine)
    if ":" not in path:
        near = difflib.get_close_matches(path, ENGINES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"engine is {path}: must be {' or '.join(ENGINES)}, or a plug-in"
            f' "package.module:Name"{hint}'
        )
    try:
        build: Callable[[RolloutServerConfig], Engine] = plugins.load(path)
        return build(config)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"engine {config.engine}: {error}") from error
