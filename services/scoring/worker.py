"""WorkerService of a scorer: a node agent gives it the device and takes it away."""
# ruff: noqa: N802 -- rpcs are named by the contract

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
from seamflow.worker.v1 import worker_service_pb2 as pb
from seamflow.worker.v1.worker_service_pb2_grpc import WorkerServiceServicer

from services.chassis.errors import invalid_argument, stale_epoch
from services.scoring.scorer import Scorer

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
