"""Entry point: `python -m services.ranker`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import grpc.aio
import numpy as np
from numpy.typing import NDArray
from seamflow.ranker.v1 import ranker_service_pb2 as pb
from seamflow.ranker.v1.ranker_service_pb2_grpc import (
    RankerServiceServicer,
    add_RankerServiceServicer_to_server,
)
from seamflow.stubs import async_stub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from services.chassis.errors import ConfigError, invalid_argument, not_found
from services.chassis.rpc.clients import channel
from services.chassis.rpc.fields import message_of, not_negative
from services.chassis.rpc.server import Service, run
from services.ranker.config import RankerConfig
from services.ranker.features import TurnStart
from services.ranker.ranker import Ranker
from services.ranker.regression import HASHED, Regression
from services.ranker.turn_feed import TurnFeed

Context = grpc.aio.ServicerContext[Any, Any]

_MAX_PROMPTS = 1024


class RankerServicer(RankerServiceServicer):
    """Answers from the latest fitted model."""

    def __init__(self, run_id: str, ranker: Ranker) -> None:
        self._run_id = run_id
        self._ranker = ranker

    async def PredictLengths(  # noqa: N802
        self, request: pb.PredictLengthsRequest, context: Context
    ) -> pb.PredictLengthsResponse:
        """Predict the sampled tokens of each prompt; NOT_FOUND before the first fit."""
        self._check_run(request.run_id)
        if len(request.prompts) > _MAX_PROMPTS:
            cure = f"at most {_MAX_PROMPTS} in one request"
            raise invalid_argument("prompts", f"{len(request.prompts)} prompts", cure)
        learned = self._ranker.learned
        if learned is None:
            raise not_found("ranker of run", request.run_id)
        starts = [
            TurnStart(
                task_id=prompt.task_id,
                token_ids=_ids(f"prompts[{i}].token_ids", prompt.token_ids),
                turn_index=not_negative(f"prompts[{i}].turn_index", prompt.turn_index),
            )
            for i, prompt in enumerate(request.prompts)
        ]
        expected = await self._ranker.expected_tokens(learned, starts)
        return pb.PredictLengthsResponse(expected_tokens=expected)

    async def GetRanker(  # noqa: N802
        self, request: pb.GetRankerRequest, context: Context
    ) -> pb.GetRankerResponse:
        self._check_run(request.run_id)
        learned = self._ranker.learned
        if learned is None:
            return pb.GetRankerResponse()
        return message_of(pb.GetRankerResponse, learned)

    def _check_run(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise not_found("ranker of run", run_id)


def _ids(field: str, packed: bytes) -> NDArray[np.int32]:
    if len(packed) % 4:
        raise invalid_argument(field, f"{len(packed)} bytes", "whole little-endian int32 ids")
    return np.frombuffer(packed, "<i4")


def main() -> None:
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
