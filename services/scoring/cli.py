"""`python -m services.scoring`: the scoring service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

from seamflow.worker.v1.worker_service_pb2_grpc import add_WorkerServiceServicer_to_server

from services.chassis.errors import ConfigError
from services.chassis.rpc.clients import channel
from services.chassis.rpc.server import Service, run
from services.scoring.config import ScoringConfig
from services.scoring.node_request import NodeRequest
from services.scoring.scorer import SCORERS, make_scorer
from services.scoring.scoring import Scoring
from services.scoring.worker import ScoringWorker


def main() -> None:
    run("scoring", ScoringConfig, build)


@asynccontextmanager
async def build(config: ScoringConfig) -> AsyncIterator[Service]:
    """Connect to the trajectory manager; load the model, unless a node agent orders it later."""
    if config.scorer in SCORERS and find_spec("transformers") is None:
        raise ConfigError("the built-in scorers need transformers: pip install 'seamflow[scoring]'")
    scorer = None if config.node_agent else await asyncio.to_thread(make_scorer, config)
    async with channel(config, config.trajectory_manager) as manager:
        worker = ScoringWorker(
            lambda: make_scorer(config),
            lambda loaded, stop: Scoring(config, manager, loaded).run(stop),
            scorer,
        )
        served = [(add_WorkerServiceServicer_to_server, worker)]
        if not config.scheduler:
            yield Service(served, background=[worker.run])
            return
        async with channel(config, config.scheduler) as scheduler:
            request = NodeRequest(config, manager, scheduler)
            yield Service(served, background=[worker.run, request.run])
