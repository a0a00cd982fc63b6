"""`python -m services.scoring`: the scoring service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

from services.chassis.errors import ConfigError
from services.chassis.rpc.clients import channel
from services.chassis.rpc.server import Service, run
from services.scoring.config import ScoringConfig
from services.scoring.scorer import SCORERS, make_scorer
from services.scoring.scoring import Scoring

__all__ = ["build", "main"]


def main() -> None:
    """Run the scoring service until a signal."""
    run("scoring", ScoringConfig, build)


@asynccontextmanager
async def build(config: ScoringConfig) -> AsyncIterator[Service]:
    """Load the model and connect to the trajectory manager."""
    if config.scorer in SCORERS and find_spec("transformers") is None:
        raise ConfigError("the built-in scorers need transformers: pip install 'seamflow[scoring]'")
    scorer = await asyncio.to_thread(make_scorer, config)
    async with channel(config, config.trajectory_manager) as manager:
        yield Service(background=[Scoring(config, manager, scorer).run])
