"""Entry point: `python -m services.ranker`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

from seamflow.ranker.v1.ranker_service_pb2_grpc import add_RankerServiceServicer_to_server
from seamflow.stubs import async_stub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from services.chassis.errors import ConfigError
from services.chassis.rpc.clients import channel
from services.chassis.rpc.server import Service, run
from services.ranker.config import RankerConfig
from services.ranker.ranker import Ranker
from services.ranker.regression import HASHED, Regression
from services.ranker.servicer import RankerServicer
from services.ranker.turn_feed import TurnFeed


def main() -> None:
    """Serve until SIGTERM."""
    run("ranker", RankerConfig, build)


@asynccontextmanager
async def build(config: RankerConfig) -> AsyncIterator[Service]:
    """Connect to the trajectory manager and read the run."""
    regression = _regression(config)
    async with channel(config, config.trajectory_manager) as manager:
        store = async_stub(TrajectoryServiceStub, manager)
        ranker = Ranker(config, TurnFeed(store, config.run_id), regression)
        servicer = RankerServicer(config.run_id, ranker)
        yield Service(
            servicers=[(add_RankerServiceServicer_to_server, servicer)], background=[ranker.run]
        )


def _regression(config: RankerConfig) -> Regression:
    """The configured kind; only a language model imports torch."""
    if find_spec("sklearn") is None:
        raise ConfigError("the ranker needs scikit-learn: pip install 'seamflow[ranker]'")
    if config.kind == "hashed":
        return HASHED
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ConfigError(
            'kind is "language_model", which needs torch and transformers: pip install '
            "'seamflow[ranker-language-model]' (image ranker-language-model), or set "
            'kind = "hashed"'
        )
    from services.ranker.language_model import LanguageModelRegression

    try:
        return LanguageModelRegression(config.language_model)
    except ValueError as error:
        raise ConfigError(f"language_model: {error}") from error
