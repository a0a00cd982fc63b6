"""`python -m tests.chaos.scheduler.worker`: the workers of one node, for as long as it lives.

They speak the contracts of a rollout server, a trainer and any other worker ("score"), hold one
device, and write down when which of them holds it. While one does the work of a gang it has an
effect every few milliseconds, which the ledger accepts or not. No GPU work is done: it is emulated.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from seamflow.rollout.v1 import rollout_server_service_pb2 as rollout_pb
from seamflow.rollout.v1 import rollout_server_service_pb2_grpc as rollout_grpc
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from seamflow.worker.v1 import worker_service_pb2 as worker_pb
from seamflow.worker.v1 import worker_service_pb2_grpc as worker_grpc

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import stale_epoch
from services.chassis.rpc.server import Service, started
from tests.chaos.scheduler.ledger import Ledger

_EFFECT_SECONDS = 0.03


class Activity:
    """One worker's hold on the node's device: OFF -> HOLDING -> OFF.

    Args:
        ledger: where it is written down.
        node: whose device.
        tag: activity.
        checked: False takes calls of older epochs than seen: the negative control.
    """

    def __init__(self, ledger: Ledger, node: str, tag: str, *, checked: bool = True) -> None:
        self._ledger = ledger
        self._node = node
        self._tag = tag
        self._checked = checked
        self.epoch = 0
        """Newest assignment seen."""
        self.holds = False
        """Whether it holds the device."""

    def hold(self, epoch: int | None = None) -> None:
        """Take the device, or keep it under `epoch`."""
        if not self.holds or self._is_news(epoch):
            self._advance(epoch)
            self.holds = True
            self._write("hold", epoch)

    def let_go(self, epoch: int | None = None) -> None:
        """Give the device back."""
        self._advance(epoch)
        if self.holds:
            self.holds = False
            self._write("let_go", epoch)

    async def have_effects(self) -> None:
        """Work, forever, while it holds the device."""
        while True:
            if self.holds:
                self._ledger.effect(self._node, self.epoch)
            await asyncio.sleep(_EFFECT_SECONDS)

    def _is_news(self, epoch: int | None) -> bool:
        return epoch is not None and epoch != self.epoch

    def _advance(self, epoch: int | None) -> None:
        if epoch is None:
            return
        if self._checked and epoch < self.epoch:
            raise stale_epoch(f"{self._tag} of {self._node}", epoch, self.epoch)
        self.epoch = epoch

    def _write(self, event: str, epoch: int | None) -> None:
        self._ledger.record(event, node=self._node, tag=self._tag, epoch=epoch)


class RolloutServer(rollout_grpc.RolloutServerServiceServicer):
    """Starts RELEASED; its contract knows no epochs, as every turn has one."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._state = rollout_pb.SERVER_STATE_RELEASED

    async def GetServerInfo(self, request: Any, context: Any) -> rollout_pb.GetServerInfoResponse:
        """Where it stands."""
        return rollout_pb.GetServerInfoResponse(state=self._state)

    async def Pause(self, request: Any, context: Any) -> rollout_pb.PauseResponse:
        """SERVING -> PAUSED."""
        if self._state == rollout_pb.SERVER_STATE_SERVING:
            self._state = rollout_pb.SERVER_STATE_PAUSED
        return rollout_pb.PauseResponse()

    async def ReleaseMemory(self, request: Any, context: Any) -> rollout_pb.ReleaseMemoryResponse:
        """PAUSED -> RELEASED."""
        self._state = rollout_pb.SERVER_STATE_RELEASED
        self._activity.let_go()
        return rollout_pb.ReleaseMemoryResponse()

    async def RestoreMemory(self, request: Any, context: Any) -> rollout_pb.RestoreMemoryResponse:
        """RELEASED -> PAUSED; from here on it holds the device."""
        self._activity.hold()
        self._state = rollout_pb.SERVER_STATE_PAUSED
        return rollout_pb.RestoreMemoryResponse()

    async def UpdateWeights(self, request: Any, context: Any) -> rollout_pb.UpdateWeightsResponse:
        """It has none."""
        return rollout_pb.UpdateWeightsResponse()

    async def GenerateTokens(
        self, request: Any, context: Any
    ) -> AsyncIterator[rollout_pb.GenerateTokensResponse]:
        """Not used."""
        return
        yield

    async def Resume(self, request: Any, context: Any) -> rollout_pb.ResumeResponse:
        """PAUSED -> SERVING."""
        self._state = rollout_pb.SERVER_STATE_SERVING
        return rollout_pb.ResumeResponse()


class Trainer(trainer_grpc.TrainerServiceServicer):
    """Starts suspended."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity

    async def GetStatus(self, request: Any, context: Any) -> trainer_pb.GetStatusResponse:
        """Where it stands."""
        holds = self._activity.holds
        on, off = trainer_pb.TRAINER_STATE_TRAINING, trainer_pb.TRAINER_STATE_SUSPENDED
        return trainer_pb.GetStatusResponse(state=on if holds else off)

    async def Resume(
        self, request: trainer_pb.ResumeRequest, context: Any
    ) -> trainer_pb.ResumeResponse:
        """SUSPENDED -> TRAINING."""
        self._activity.hold(request.epoch)
        return trainer_pb.ResumeResponse()

    async def Suspend(
        self, request: trainer_pb.SuspendRequest, context: Any
    ) -> trainer_pb.SuspendResponse:
        """TRAINING -> SUSPENDED."""
        self._activity.let_go(request.epoch)
        return trainer_pb.SuspendResponse()

    async def SaveCheckpoint(self, request: Any, context: Any) -> trainer_pb.SaveCheckpointResponse:
        """It has nothing to save."""
        return trainer_pb.SaveCheckpointResponse()


class AnyWorker(worker_grpc.WorkerServiceServicer):
    """Starts OFF."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity

    async def GetStatus(self, request: Any, context: Any) -> worker_pb.GetStatusResponse:
        """Where it stands."""
        on, off = worker_pb.WORKER_STATE_ON, worker_pb.WORKER_STATE_OFF
        state = on if self._activity.holds else off
        return worker_pb.GetStatusResponse(state=state, epoch=self._activity.epoch)

    async def Activate(
        self, request: worker_pb.ActivateRequest, context: Any
    ) -> worker_pb.ActivateResponse:
        """OFF -> ON."""
        self._activity.hold(request.epoch)
        return worker_pb.ActivateResponse()

    async def Deactivate(
        self, request: worker_pb.DeactivateRequest, context: Any
    ) -> worker_pb.DeactivateResponse:
        """ON -> OFF."""
        self._activity.let_go(request.epoch)
        return worker_pb.DeactivateResponse()


def service(ledger: Ledger, node: str, *, checked: bool = True) -> Service:
    """All workers of `node`."""
    activity = partial(Activity, ledger, node, checked=checked)
    rollout, train, score = activity("rollout"), activity("train"), activity("score")
    return Service(
        servicers=[
            (rollout_grpc.add_RolloutServerServiceServicer_to_server, RolloutServer(rollout)),
            (trainer_grpc.add_TrainerServiceServicer_to_server, Trainer(train)),
            (worker_grpc.add_WorkerServiceServicer_to_server, AnyWorker(score)),
        ],
        # Turns are fenced by epochs of their own: what rollout does is not the gangs' business.
        background=[train.have_effects, score.have_effects],
    )


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of the ledger")
    parser.add_argument("--unchecked", action="store_true", help="take calls of older epochs")
    parser.add_argument("--unfenced", action="store_true", help="accept everybody's effects")
    given = parser.parse_args()

    @asynccontextmanager
    async def served() -> AsyncIterator[int]:
        ledger = Ledger(given.folder, fenced=not given.unfenced)
        workers = service(ledger, given.node, checked=not given.unchecked)
        async with started(workers, ServerConfig(port=given.port, admin_port=-1)) as port:
            yield port

    async def serve() -> None:
        async with served():
            await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
