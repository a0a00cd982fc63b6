"""Clients of a node's workers: activation and deactivation of each activity.

They move device state, not processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

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

T = TypeVar("T")

# Below the servers' cap on unary calls. A suspension waits for the end of an optimizer step, which
# may take minutes; keep-alive detects a dead worker long before, and all calls are idempotent.
_SWITCH_TIMEOUT_SECONDS = 840.0
_STATUS_TIMEOUT_SECONDS = 10.0


class Role(NamedTuple):
    """An activity for a training job."""

    tag: str
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """Status and measurements of a worker."""

    is_off: bool
    """It does not hold the device."""
    used_device_bytes: int = 0
    """Device memory in use. For an active rollout server or trainer: what it last released."""
    num_turns: int = 0
    tokens_per_second: float = 0.0
    max_running: int = 0


class Activity(Protocol):
    """Control of one worker. All methods are idempotent and raise AioRpcError."""

    async def activate(self, epoch: int) -> None: ...

    async def deactivate(self, epoch: int) -> None:
        """Stop and release the device; work in flight migrates or waits."""
        ...

    async def status(self) -> WorkerStatus: ...

    async def hand_over(self) -> None:
        """Hand work in flight over to other nodes, before this node leaves."""
        ...


class RolloutActivity:
    """Serves turns; the gateway continues interrupted ones from their recorded tokens."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._server = async_stub(RolloutServerServiceStub, channel)
        self._num_bytes = 0

    async def activate(self, epoch: int) -> None:
        state = (await self._info()).state
        if state == rollout_pb.SERVER_STATE_SERVING:
            return
        if state == rollout_pb.SERVER_STATE_RELEASED:
            await self._server.RestoreMemory(
                rollout_pb.RestoreMemoryRequest(), timeout=_SWITCH_TIMEOUT_SECONDS
            )
        await self._server.Resume(rollout_pb.ResumeRequest(), timeout=_SWITCH_TIMEOUT_SECONDS)

    async def deactivate(self, epoch: int) -> None:
        """End running turns INTERRUPTED, then release weights and KV cache."""
        if (await self.status()).is_off:
            return
        await self.hand_over()
        given = await self._server.ReleaseMemory(
            rollout_pb.ReleaseMemoryRequest(), timeout=_SWITCH_TIMEOUT_SECONDS
        )
        self._num_bytes = given.num_bytes

    async def status(self) -> WorkerStatus:
        info = await self._info()
        is_off = info.state == rollout_pb.SERVER_STATE_RELEASED
        return WorkerStatus(
            is_off=is_off,
            used_device_bytes=0 if is_off else self._num_bytes,
            num_turns=info.num_running + info.num_queued,
            tokens_per_second=info.tokens_per_second,
            max_running=info.max_running,
        )

    async def hand_over(self) -> None:
        abort = rollout_pb.PauseRequest(mode=rollout_pb.PAUSE_MODE_ABORT)
        await self._server.Pause(abort, timeout=_SWITCH_TIMEOUT_SECONDS)

    async def _info(self) -> rollout_pb.GetServerInfoResponse:
        request = rollout_pb.GetServerInfoRequest()
        return await self._server.GetServerInfo(request, timeout=_STATUS_TIMEOUT_SECONDS)


class TrainActivity:
    """Trains. The trainer rejects stale epochs of this node."""

    def __init__(self, channel: grpc.aio.Channel, node_id: str) -> None:
        self._node_id = node_id
        self._trainer = async_stub(TrainerServiceStub, channel)
        self._num_bytes = 0

    async def activate(self, epoch: int) -> None:
        """Move parameters and optimizer state to the device, once the whole gang is granted."""
        request = trainer_pb.ResumeRequest(epoch=epoch, node_id=self._node_id)
        await self._trainer.Resume(request, timeout=_SWITCH_TIMEOUT_SECONDS)

    async def deactivate(self, epoch: int) -> None:
        """Move them to host memory at the next optimizer-step boundary."""
        request = trainer_pb.SuspendRequest(epoch=epoch, node_id=self._node_id)
        given = await self._trainer.Suspend(request, timeout=_SWITCH_TIMEOUT_SECONDS)
        self._num_bytes = given.num_bytes or self._num_bytes

    async def status(self) -> WorkerStatus:
        request = trainer_pb.GetStatusRequest(node_id=self._node_id)
        status = await self._trainer.GetStatus(request, timeout=_STATUS_TIMEOUT_SECONDS)
        # Older trainers report their state only.
        is_off = status.suspended or status.state == trainer_pb.TRAINER_STATE_SUSPENDED
        return WorkerStatus(is_off=is_off, used_device_bytes=0 if is_off else self._num_bytes)

    async def hand_over(self) -> None:
        """Do nothing: a training step cannot migrate; it restarts from the checkpoint."""


class WorkerActivity:
    """Any worker that serves `seamflow.worker.v1`: scoring, a critic, a reference model."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._worker = async_stub(WorkerServiceStub, channel)

    async def activate(self, epoch: int) -> None:
        await self._worker.Activate(
            worker_pb.ActivateRequest(epoch=epoch), timeout=_SWITCH_TIMEOUT_SECONDS
        )

    async def deactivate(self, epoch: int) -> None:
        request = worker_pb.DeactivateRequest(epoch=epoch)
        await self._worker.Deactivate(request, timeout=_SWITCH_TIMEOUT_SECONDS)

    async def status(self) -> WorkerStatus:
        status = await self._worker.GetStatus(
            worker_pb.GetStatusRequest(), timeout=_STATUS_TIMEOUT_SECONDS
        )
        return WorkerStatus(
            is_off=status.state == worker_pb.WORKER_STATE_OFF,
            used_device_bytes=status.used_device_bytes,
        )

    async def hand_over(self) -> None:
        """Do nothing: calls in flight end when it is deactivated."""


class SupervisedActivity:
    """Activity of a supervised worker process, which is killed if it does not release the device.

    The process is restarted, off; one that takes the device at its start (a rollout server) is
    restarted only when the device is free.

    Args:
        inner: controls the worker while it answers.
        process: the worker's process.
        clock: monotonic seconds.
    """

    def __init__(self, inner: Activity, process: WorkerProcess, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._process = process
        self._clock = clock
        self._deactivating_since: float | None = None  # time of the first unanswered deactivation
        self._starts_on = isinstance(inner, RolloutActivity)
        self._killed = metrics.counter(
            "node_agent", "workers_killed_total", "Workers killed to free a device.", ("process",)
        )

    async def activate(self, epoch: int) -> None:
        """Activate the worker; a process that has exited cleanly is restarted."""
        self._deactivating_since = None
        self._process.set_restart(True)
        await self._inner.activate(epoch)

    async def deactivate(self, epoch: int) -> None:
        """Deactivate the worker, or kill its process after `deactivate_seconds`."""
        if self._starts_on:
            self._process.set_restart(False)
        if self._process.is_running:
            await self._deactivate_or_kill(epoch)
        self._deactivating_since = None

    async def status(self) -> WorkerStatus:
        return await self._inner.status() if self._process.is_running else WorkerStatus(is_off=True)

    async def hand_over(self) -> None:
        await self._inner.hand_over()

    async def _deactivate_or_kill(self, epoch: int) -> None:
        name, seconds = self._process.name, self._process.plan.deactivate_seconds
        self._deactivating_since = (
            self._clock() if self._deactivating_since is None else self._deactivating_since
        )
        try:
            async with asyncio.timeout(self._deactivating_since + seconds - self._clock()):
                await self._inner.deactivate(epoch)
        except TimeoutError:
            get_logger().error("worker_killed", process=name, deactivate_seconds=seconds)
            self._killed.labels(name).inc()
            await self._process.kill()


class JointActivity:
    """Several workers that share the node's GPUs, such as rollout servers of one GPU each.

    They do everything at once; the node is switched when the last one is.
    """

    def __init__(self, workers: Sequence[Activity]) -> None:
        self._workers = workers

    async def activate(self, epoch: int) -> None:
        await _all(worker.activate(epoch) for worker in self._workers)

    async def deactivate(self, epoch: int) -> None:
        await _all(worker.deactivate(epoch) for worker in self._workers)

    async def status(self) -> WorkerStatus:
        found = await _all(worker.status() for worker in self._workers)
        return WorkerStatus(
            is_off=all(status.is_off for status in found),
            used_device_bytes=sum(status.used_device_bytes for status in found),
            num_turns=sum(status.num_turns for status in found),
            tokens_per_second=sum(status.tokens_per_second for status in found),
            max_running=sum(status.max_running for status in found),
        )

    async def hand_over(self) -> None:
        await _all(worker.hand_over() for worker in self._workers)


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for every call, also if one fails; raises its error then."""
    ended = await asyncio.gather(*calls, return_exceptions=True)
    for end in ended:
        if isinstance(end, BaseException):
            raise end
    return [end for end in ended if not isinstance(end, BaseException)]


def activity(tag: str, channel: grpc.aio.Channel, node_id: str) -> Activity:
    """The activity `tag` on node `node_id`, for the worker at `channel`."""
    match tag:
        case "rollout":
            return RolloutActivity(channel)
        case "train":
            return TrainActivity(channel, node_id)
        case _:
            return WorkerActivity(channel)
