"""`python -m services.scoring`: the scoring service."""

from __future__ import annotations

import asyncio

# ruff: noqa: N802 -- rpcs are named by the contract
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import grpc.aio
from seamflow.worker.v1 import worker_service_pb2 as pb
from seamflow.worker.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)

from services.chassis.errors import ConfigError, invalid_argument, stale_epoch
from services.chassis.rpc.clients import channel
from services.chassis.rpc.server import Service, run
from services.scoring.config import ScoringConfig
from services.scoring.node_request import NodeRequest, ScoredRollouts
from services.scoring.scorer import SCORERS, Scorer, make_scorer
from services.scoring.scoring import Scoring

Context = grpc.aio.ServicerContext[Any, Any]


class ScoringWorker(WorkerServiceServicer):
    """OFF -> ON -> OFF ..., as ordered under the newest epoch; OFF holds no model and no lease.

    Args:
        load: loads the scorer, in a thread.
        score: scores with it until the event is set, and returns where no work is lost.
        scorer: one that is loaded already: the worker starts ON and needs no node agent.
    """

    def __init__(
        self,
        load: Callable[[], Scorer],
        score: Callable[[Scorer, asyncio.Event], Awaitable[None]],
        scorer: Scorer | None = None,
    ) -> None:
        self._load, self._score = load, score
        self._scorer = scorer
        self._epoch = 0
        self._wanted, self._unwanted = asyncio.Event(), asyncio.Event()
        self._changed = asyncio.Condition()
        self._is_on = False
        if scorer is not None:
            self._wanted.set()

    async def run(self) -> None:
        """Follow the orders until cancelled; raises what loading or scoring raises."""
        while True:
            await self._wanted.wait()
            if self._scorer is None:
                self._scorer = await asyncio.to_thread(self._load)
            await self._set(is_on=True)
            await self._score(self._scorer, self._unwanted)
            self._scorer = None
            _free_device_memory()
            await self._set(is_on=False)

    async def Activate(self, request: pb.ActivateRequest, context: Context) -> pb.ActivateResponse:
        """Load the model and score; answers when it is loaded."""
        self._accept(request.epoch)
        self._unwanted.clear()
        self._wanted.set()
        await self._until(request.epoch, is_on=True)
        return pb.ActivateResponse()

    async def Deactivate(
        self, request: pb.DeactivateRequest, context: Context
    ) -> pb.DeactivateResponse:
        """End the forward pass, write, give back the rest; answers when the model is dropped."""
        self._accept(request.epoch)
        before = _device_bytes()
        self._wanted.clear()
        self._unwanted.set()
        await self._until(request.epoch, is_on=False)
        return pb.DeactivateResponse(num_bytes=max(before - _device_bytes(), 0))

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        state = pb.WORKER_STATE_ON if self._is_on else pb.WORKER_STATE_OFF
        return pb.GetStatusResponse(
            state=state, epoch=self._epoch, used_device_bytes=_device_bytes()
        )

    def _accept(self, epoch: int) -> None:
        if epoch < 1:
            raise invalid_argument("epoch", epoch, "give the assignment's epoch, 1 or more")
        if epoch < self._epoch:
            raise stale_epoch("the scorer's assignment", epoch, self._epoch)
        self._epoch = epoch

    async def _set(self, *, is_on: bool) -> None:
        async with self._changed:
            self._is_on = is_on
            self._changed.notify_all()

    async def _until(self, epoch: int, *, is_on: bool) -> None:
        """Wait for the state; a newer order ends the wait with STALE_EPOCH."""
        async with self._changed:
            self._changed.notify_all()  # waiters under an older epoch
            await self._changed.wait_for(lambda: self._is_on is is_on or self._epoch > epoch)
        if self._epoch > epoch:
            raise stale_epoch("the scorer's assignment", epoch, self._epoch)


def _device_bytes() -> int:
    torch: Any = sys.modules.get("torch")  # loaded by scorers that use it
    return torch.cuda.memory_reserved() if torch and torch.cuda.is_available() else 0


def _free_device_memory() -> None:
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    run("scoring", ScoringConfig, build)


@asynccontextmanager
async def build(config: ScoringConfig) -> AsyncIterator[Service]:
    """Connect to the trajectory manager; load the model, unless a node agent orders it later."""
    if config.scorer in SCORERS and find_spec("transformers") is None:
        raise ConfigError("the built-in scorers need transformers: pip install 'seamflow[scoring]'")
    scorer = None if config.node_agent else await asyncio.to_thread(make_scorer, config)
    async with channel(config, config.trajectory_manager) as manager:
        scored = ScoredRollouts()
        worker = ScoringWorker(
            lambda: make_scorer(config),
            lambda loaded, stop: Scoring(config, manager, loaded, scored).run(stop),
            scorer,
        )
        served = [(add_WorkerServiceServicer_to_server, worker)]
        if not config.scheduler:
            yield Service(served, background=[worker.run])
            return
        async with channel(config, config.scheduler) as scheduler:
            request = NodeRequest(config, manager, scheduler, scored)
            yield Service(served, background=[worker.run, request.run])
