"""A node's workers, which record the calls they receive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from seamflow.rollout.v1 import rollout_server_service_pb2 as rollout_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import (
    RolloutServerServiceServicer,
    add_RolloutServerServiceServicer_to_server,
)
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import (
    TrainerServiceServicer,
    add_TrainerServiceServicer_to_server,
)
from seamflow.worker.v1 import worker_service_pb2 as worker_pb
from seamflow.worker.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)

from bench.harness.constants import changed
from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.server import Service, started
from services.node_agent.agent import NodeAgent
from services.node_agent.cli import build
from services.node_agent.config import NodeAgentConfig
from tests.lib.scheduler.support import BOTH, RUN, list_nodes

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub


class Journal:
    """The calls that the workers of a node received, in order."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._grown = asyncio.Event()

    def add(self, entry: str) -> None:
        """One more."""
        self.entries.append(entry)
        self._grown.set()

    async def until(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Wait until `condition` holds for the entries."""
        while not condition(self.entries):
            self._grown.clear()
            await self._grown.wait()
        return self.entries


class RecordingRolloutServer(RolloutServerServiceServicer):
    """Keeps the life cycle of a rollout server, without an engine."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.state = rollout_pb.SERVER_STATE_SERVING

    async def GetServerInfo(self, request: Any, context: Any) -> rollout_pb.GetServerInfoResponse:
        """The state."""
        return rollout_pb.GetServerInfoResponse(
            state=self.state, num_running=3, num_queued=2, tokens_per_second=70.0
        )

    async def Pause(
        self, request: rollout_pb.PauseRequest, context: Any
    ) -> rollout_pb.PauseResponse:
        """SERVING -> PAUSED."""
        self._journal.add(rollout_pb.PauseMode.Name(request.mode).removeprefix("PAUSE_MODE_"))
        self.state = rollout_pb.SERVER_STATE_PAUSED
        return rollout_pb.PauseResponse()

    async def ReleaseMemory(self, request: Any, context: Any) -> rollout_pb.ReleaseMemoryResponse:
        """PAUSED -> RELEASED."""
        self._journal.add("release")
        self.state = rollout_pb.SERVER_STATE_RELEASED
        return rollout_pb.ReleaseMemoryResponse(num_bytes=1000)

    async def RestoreMemory(self, request: Any, context: Any) -> rollout_pb.RestoreMemoryResponse:
        """RELEASED -> PAUSED."""
        self._journal.add("restore")
        self.state = rollout_pb.SERVER_STATE_PAUSED
        return rollout_pb.RestoreMemoryResponse()

    async def Resume(self, request: Any, context: Any) -> rollout_pb.ResumeResponse:
        """PAUSED -> SERVING."""
        self._journal.add("serve")
        self.state = rollout_pb.SERVER_STATE_SERVING
        return rollout_pb.ResumeResponse()


class RecordingTrainer(TrainerServiceServicer):
    """Keeps the life cycle of a trainer, without training; `boundary` is its next step's end."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.suspended = False
        self.epochs: list[int] = []
        self.boundary = asyncio.Event()
        self.boundary.set()

    async def GetStatus(self, request: Any, context: Any) -> trainer_pb.GetStatusResponse:
        """The state."""
        suspended = trainer_pb.TRAINER_STATE_SUSPENDED
        state = suspended if self.suspended else trainer_pb.TRAINER_STATE_TRAINING
        return trainer_pb.GetStatusResponse(state=state)

    async def Suspend(
        self, request: trainer_pb.SuspendRequest, context: Any
    ) -> trainer_pb.SuspendResponse:
        """Answers at the boundary."""
        self.epochs.append(request.epoch)
        if not self.suspended:
            self._journal.add("suspending")
            await self.boundary.wait()
            self.suspended = True
            self._journal.add("suspended")
        return trainer_pb.SuspendResponse()

    async def Resume(
        self, request: trainer_pb.ResumeRequest, context: Any
    ) -> trainer_pb.ResumeResponse:
        """Back to work."""
        self.epochs.append(request.epoch)
        self._journal.add("train")
        self.suspended = False
        return trainer_pb.ResumeResponse()


class RecordingWorker(WorkerServiceServicer):
    """Keeps the life cycle of a worker of any tag."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal = journal
        self._name = name
        self.is_on = False

    async def GetStatus(self, request: Any, context: Any) -> worker_pb.GetStatusResponse:
        """The state."""
        state = worker_pb.WORKER_STATE_ON if self.is_on else worker_pb.WORKER_STATE_OFF
        return worker_pb.GetStatusResponse(state=state, used_device_bytes=500 * self.is_on)

    async def Activate(self, request: Any, context: Any) -> worker_pb.ActivateResponse:
        """OFF -> ON."""
        if not self.is_on:
            self._journal.add(f"{self._name} on")
            self.is_on = True
        return worker_pb.ActivateResponse()

    async def Deactivate(self, request: Any, context: Any) -> worker_pb.DeactivateResponse:
        """ON -> OFF."""
        if self.is_on:
            self._journal.add(f"{self._name} off")
            self.is_on = False
        return worker_pb.DeactivateResponse()


class Workers:
    """The processes of one node, served in this one."""

    def __init__(self, journal: Journal | None = None, name: str = "worker") -> None:
        self.journal = journal or Journal()
        self.worker = RecordingWorker(self.journal, name)
        self.rollout = RecordingRolloutServer(self.journal)
        self.trainer = RecordingTrainer(self.journal)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Serve both; gives their address."""
        servicers: list[tuple[Callable[[Any, Any], None], object]] = [
            (add_RolloutServerServiceServicer_to_server, self.rollout),
            (add_TrainerServiceServicer_to_server, self.trainer),
            (add_WorkerServiceServicer_to_server, self.worker),
        ]
        config = ServerConfig(port=port, drain_seconds=0.1)
        async with started(Service(servicers=servicers), config) as bound:
            yield f"127.0.0.1:{bound}"


def agent_config(
    name: str,
    scheduler_port: int,
    address: str,
    tags: tuple[str, ...] = BOTH,
    **settings: Any,
) -> NodeAgentConfig:
    """Configuration of a node agent whose workers share one address."""
    return NodeAgentConfig(
        port=0,
        drain_seconds=1.0,
        node_id=name,
        run_id=RUN,
        capability_tags=tags,
        scheduler=f"127.0.0.1:{scheduler_port}",
        rollout_server=address if "rollout" in tags else None,
        trainer=address if "train" in tags else None,
        **settings,
    )


@asynccontextmanager
async def running_agent(
    config: NodeAgentConfig,
    agent_class: type[NodeAgent] = NodeAgent,
    recheck_seconds: float = 60.0,
) -> AsyncIterator[None]:
    """A node agent in this process, drained at the end."""
    with changed("services.node_agent.cli", {"recheck_seconds": recheck_seconds}):
        async with build(config, agent_class) as service, started(service, config, "node_agent"):
            yield


async def active(stub: SchedulerServiceAsyncStub, name: str, tag: str) -> None:
    """Wait until the scheduler knows that `name` does `tag`, as assigned."""
    watch = stub.WatchAllocations(pb.WatchAllocationsRequest())
    try:
        while True:
            node = (await list_nodes(stub)).get(name, pb.Node())
            taken_up = node.reported_epoch == node.assignment.epoch
            if (node.assignment.tag, node.state) == (tag, pb.NODE_STATE_ACTIVE) and taken_up:
                return
            await watch.read()
    finally:
        watch.cancel()


async def state_of(
    stub: SchedulerServiceAsyncStub, name: str, state: pb.NodeState.ValueType
) -> None:
    """Wait until the scheduler knows `name` in `state`."""
    watch = stub.WatchAllocations(pb.WatchAllocationsRequest())
    try:
        while (await list_nodes(stub)).get(name, pb.Node()).state != state:
            await watch.read()
    finally:
        watch.cancel()
