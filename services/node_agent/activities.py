"""What it takes to begin and to end each activity on a node. Processes stay; device state moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import grpc.aio
from seamflow.rollout.v1 import rollout_server_service_pb2 as rollout_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.stubs import async_stub
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from seamflow.worker.v1 import worker_service_pb2 as worker_pb
from seamflow.worker.v1.worker_service_pb2_grpc import WorkerServiceStub

from services.chassis import metrics
from services.chassis.log import get_logger
from services.node_agent.worker_process import WorkerProcess

__all__ = [
    "Activity",
    "Role",
    "RolloutActivity",
    "SupervisedActivity",
    "TrainActivity",
    "WorkerActivity",
    "WorkerStatus",
    "activity",
]

# Below the servers' cap on unary calls. A suspension waits for the next optimizer step, which may
# take minutes; keep-alive notices a dead worker long before, and every call may be repeated.
_MOVE_SECONDS = 840.0
_ASK_SECONDS = 10.0


class Role(NamedTuple):
    """What a worker does, and for whom."""

    tag: str
    """Activity tag."""
    run_id: str
    """Training job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a worker says of itself."""

    is_off: bool
    """It has given the device back, or never had it."""
    used_device_bytes: int = 0
    """Device memory in use. Of a rollout server or trainer that is on: what it last gave back."""
    num_turns: int = 0
    """Turns it runs or holds in its queue."""
    tokens_per_second: float = 0.0
    """Tokens it samples."""


class Activity(Protocol):
    """One worker's part. Every method may be repeated, and raises AioRpcError."""

    async def activate(self, epoch: int) -> None:
        """Take the device and work, under assignment `epoch`."""
        ...

    async def deactivate(self, epoch: int) -> None:
        """Stop and give the device back; work in flight goes on elsewhere or waits."""
        ...

    async def status(self) -> WorkerStatus:
        """Where it stands."""
        ...

    async def hand_over(self) -> None:
        """The node is about to go away: let work in flight go on elsewhere."""
        ...


class RolloutActivity:
    """Serve turns. Interrupted turns are continued by the gateway from their recorded tokens."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._server = async_stub(RolloutServerServiceStub, channel)
        self._num_bytes = 0

    async def activate(self, epoch: int) -> None:
        """Load the newest weights and serve."""
        state = (await self._info()).state
        if state == rollout_pb.SERVER_STATE_SERVING:
            return
        if state == rollout_pb.SERVER_STATE_RELEASED:
            await self._server.RestoreMemory(
                rollout_pb.RestoreMemoryRequest(), timeout=_MOVE_SECONDS
            )
        await self._server.Resume(rollout_pb.ResumeRequest(), timeout=_MOVE_SECONDS)

    async def deactivate(self, epoch: int) -> None:
        """End running turns INTERRUPTED, then give weights and KV cache back."""
        if (await self.status()).is_off:
            return
        await self.hand_over()
        given = await self._server.ReleaseMemory(
            rollout_pb.ReleaseMemoryRequest(), timeout=_MOVE_SECONDS
        )
        self._num_bytes = given.num_bytes

    async def status(self) -> WorkerStatus:
        """Off when its memory is released."""
        info = await self._info()
        is_off = info.state == rollout_pb.SERVER_STATE_RELEASED
        return WorkerStatus(
            is_off=is_off,
            used_device_bytes=0 if is_off else self._num_bytes,
            num_turns=info.num_running + info.num_queued,
            tokens_per_second=info.tokens_per_second,
        )

    async def hand_over(self) -> None:
        """End running turns INTERRUPTED."""
        abort = rollout_pb.PauseRequest(mode=rollout_pb.PAUSE_MODE_ABORT)
        await self._server.Pause(abort, timeout=_MOVE_SECONDS)

    async def _info(self) -> rollout_pb.GetServerInfoResponse:
        request = rollout_pb.GetServerInfoRequest()
        return await self._server.GetServerInfo(request, timeout=_ASK_SECONDS)


class TrainActivity:
    """Train. The trainer refuses epochs older than it has seen of this node."""

    def __init__(self, channel: grpc.aio.Channel, node_id: str) -> None:
        self._node_id = node_id
        self._trainer = async_stub(TrainerServiceStub, channel)
        self._num_bytes = 0

    async def activate(self, epoch: int) -> None:
        """Move parameters and optimizer state to the device, once the whole gang gave its own."""
        request = trainer_pb.ResumeRequest(epoch=epoch, node_id=self._node_id)
        await self._trainer.Resume(request, timeout=_MOVE_SECONDS)

    async def deactivate(self, epoch: int) -> None:
        """Move them out at the next optimizer-step boundary."""
        request = trainer_pb.SuspendRequest(epoch=epoch, node_id=self._node_id)
        given = await self._trainer.Suspend(request, timeout=_MOVE_SECONDS)
        self._num_bytes = given.num_bytes or self._num_bytes

    async def status(self) -> WorkerStatus:
        """Off when it is suspended, on this node at least; a trainer starts that way."""
        request = trainer_pb.GetStatusRequest(node_id=self._node_id)
        status = await self._trainer.GetStatus(request, timeout=_ASK_SECONDS)
        # An older trainer tells by its state alone.
        is_off = status.suspended or status.state == trainer_pb.TRAINER_STATE_SUSPENDED
        return WorkerStatus(is_off=is_off, used_device_bytes=0 if is_off else self._num_bytes)

    async def hand_over(self) -> None:
        """Nothing: a training step cannot move; its checkpoint covers it."""


class WorkerActivity:
    """Whatever a worker of anyone's own does on its device: scoring, a critic, a reference."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._worker = async_stub(WorkerServiceStub, channel)

    async def activate(self, epoch: int) -> None:
        """Take the device."""
        await self._worker.Activate(worker_pb.ActivateRequest(epoch=epoch), timeout=_MOVE_SECONDS)

    async def deactivate(self, epoch: int) -> None:
        """Give it back at the next point where nothing is lost."""
        request = worker_pb.DeactivateRequest(epoch=epoch)
        await self._worker.Deactivate(request, timeout=_MOVE_SECONDS)

    async def status(self) -> WorkerStatus:
        """As it says; a worker starts off."""
        status = await self._worker.GetStatus(worker_pb.GetStatusRequest(), timeout=_ASK_SECONDS)
        return WorkerStatus(
            is_off=status.state == worker_pb.WORKER_STATE_OFF,
            used_device_bytes=status.used_device_bytes,
        )

    async def hand_over(self) -> None:
        """Nothing: its calls in flight end when it is deactivated."""


class SupervisedActivity:
    """The activity of a worker whose process is ours: one that does not let go is killed.

    Killing is the one sure way to take a device back. The process is started again, off: one that
    comes up with the device in its hands (a rollout server) waits until the device is free.

    Args:
        inner: what it takes as long as the worker answers.
        process: the worker's.
        clock: monotonic seconds.
    """

    def __init__(self, inner: Activity, process: WorkerProcess, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._process = process
        self._clock = clock
        self._asked: float | None = None  # since when it is asked in vain to let go
        self._starts_on = isinstance(inner, RolloutActivity)
        self._killed = metrics.counter(
            "node_agent", "workers_killed_total", "Workers that did not let go.", ("process",)
        )

    async def activate(self, epoch: int) -> None:
        """See the inner activity; a process that has done its work is started again."""
        self._asked = None
        self._process.want(True)
        await self._inner.activate(epoch)

    async def deactivate(self, epoch: int) -> None:
        """See the inner activity; at the end the worker is off, or dead."""
        if self._starts_on:
            self._process.want(False)
        if self._process.is_running:
            await self._let_go(epoch)
        self._asked = None

    async def status(self) -> WorkerStatus:
        """Off while its process does not run."""
        return await self._inner.status() if self._process.is_running else WorkerStatus(is_off=True)

    async def hand_over(self) -> None:
        """See the inner activity."""
        await self._inner.hand_over()

    async def _let_go(self, epoch: int) -> None:
        name, seconds = self._process.name, self._process.plan.deactivate_seconds
        self._asked = self._clock() if self._asked is None else self._asked
        try:
            async with asyncio.timeout(self._asked + seconds - self._clock()):
                await self._inner.deactivate(epoch)
        except TimeoutError:
            get_logger().error("worker_killed", process=name, deactivate_seconds=seconds)
            self._killed.labels(name).inc()
            await self._process.kill()


def activity(tag: str, channel: grpc.aio.Channel, node_id: str) -> Activity:
    """The activity `tag` on node `node_id`, of the worker that answers at `channel`."""
    match tag:
        case "rollout":
            return RolloutActivity(channel)
        case "train":
            return TrainActivity(channel, node_id)
        case _:
            return WorkerActivity(channel)
