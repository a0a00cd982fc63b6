"""An engine from outside the tree, as a user would plug one in: it dies after its first step."""

from __future__ import annotations

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.fake import FakeEngine


async def _die() -> None:
    raise RuntimeError("the device fell off the bus")


def build(config: RolloutServerConfig) -> FakeEngine:
    """Make the engine; `config.engine` names this function."""
    return FakeEngine(config, step=_die)
