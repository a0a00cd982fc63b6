"""What it takes to begin and to end each activity on a node. Processes stay; device state moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import grpc.aio
from seamflow.rollout.v1 import rollout_server_service_pb2 as rollout_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceAsyncStub
    from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub

__all__ = ["ACTIVITIES", "Activity", "RolloutActivity", "TrainActivity"]

# Below the servers' cap on unary calls. A suspension waits for the next optimizer step, which may
# take minutes; keep-alive notices a dead worker long before, and every call may be repeated.
_MOVE_SECONDS = 840.0
_ASK_SECONDS = 10.0


class Activity(Protocol):
    """One capability of a node. Every method may be repeated, and raises AioRpcError."""

    async def activate(self, epoch: int) -> None:
        """Take the device and work, under assignment `epoch`."""
        ...

    async def deactivate(self, epoch: int) -> None:
        """Stop and give the device back; work in flight goes on elsewhere or waits."""
        ...

    async def is_off(self) -> bool:
        """True when the worker has given the device back, or never had it."""
        ...

    async def hand_over(self) -> None:
        """The node is about to go away: let work in flight go on elsewhere."""
        ...


class RolloutActivity:
    """Serve turns. Interrupted turns are continued by the gateway from their recorded tokens."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._server: RolloutServerServiceAsyncStub = RolloutServerServiceStub(channel)  # type: ignore[assignment]

    async def activate(self, epoch: int) -> None:
        """Load the newest weights and serve."""
        state = await self._state()
        if state == rollout_pb.SERVER_STATE_SERVING:
            return
        if state == rollout_pb.SERVER_STATE_RELEASED:
            await self._server.RestoreMemory(
                rollout_pb.RestoreMemoryRequest(), timeout=_MOVE_SECONDS
            )
        await self._server.Resume(rollout_pb.ResumeRequest(), timeout=_MOVE_SECONDS)

    async def deactivate(self, epoch: int) -> None:
        """End running turns INTERRUPTED, then give weights and KV cache back."""
        if await self.is_off():
            return
        await self.hand_over()
        await self._server.ReleaseMemory(rollout_pb.ReleaseMemoryRequest(), timeout=_MOVE_SECONDS)

    async def is_off(self) -> bool:
        """True when its memory is released."""
        return await self._state() == rollout_pb.SERVER_STATE_RELEASED

    async def hand_over(self) -> None:
        """End running turns INTERRUPTED."""
        abort = rollout_pb.PauseRequest(mode=rollout_pb.PAUSE_MODE_ABORT)
        await self._server.Pause(abort, timeout=_MOVE_SECONDS)

    async def _state(self) -> rollout_pb.ServerState.ValueType:
        info = await self._server.GetServerInfo(
            rollout_pb.GetServerInfoRequest(), timeout=_ASK_SECONDS
        )
        return info.state


class TrainActivity:
    """Train. The trainer refuses epochs older than it has seen."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._trainer: TrainerServiceAsyncStub = TrainerServiceStub(channel)  # type: ignore[assignment]

    async def activate(self, epoch: int) -> None:
        """Move parameters and optimizer state to the device."""
        await self._trainer.Resume(trainer_pb.ResumeRequest(epoch=epoch), timeout=_MOVE_SECONDS)

    async def deactivate(self, epoch: int) -> None:
        """Move them out at the next optimizer-step boundary."""
        await self._trainer.Suspend(trainer_pb.SuspendRequest(epoch=epoch), timeout=_MOVE_SECONDS)

    async def is_off(self) -> bool:
        """True when it is suspended; a trainer starts that way."""
        status = await self._trainer.GetStatus(trainer_pb.GetStatusRequest(), timeout=_ASK_SECONDS)
        return status.state == trainer_pb.TRAINER_STATE_SUSPENDED

    async def hand_over(self) -> None:
        """Nothing: a training step cannot move; its checkpoint covers it."""


ACTIVITIES: Mapping[str, Callable[[grpc.aio.Channel], Activity]] = {
    "rollout": RolloutActivity,
    "train": TrainActivity,
}
"""By capability tag; each is made with a channel to the tag's worker."""
