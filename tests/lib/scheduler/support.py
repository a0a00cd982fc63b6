"""Nodes, gangs and running schedulers for the tests of scheduler and node agent."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seamflow.channel import connect
from seamflow.durations import to_duration
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub

from bench.harness.constants import changed, split
from scheduler import limits
from scheduler.cli import build, service
from scheduler.config import SchedulerConfig
from scheduler.model.records import Gang, Node, State
from scheduler.policy.allocation_policy import AllocationPolicy, PreemptivePolicy
from scheduler.pool.state_transaction import StateTransaction
from services.chassis.rpc.server import Service, started
from tests.lib.redis_server import free_port
from tests.lib.scheduler.memory_store import MemoryStore

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

ROOT = Path(__file__).parents[3]
RUN = "run"
BOTH = ("rollout", "train")


def node(name: str, *tags: str, **fields: Any) -> Node:
    """A node of `RUN` that can do `tags`."""
    return Node(node_id=name, run_id=RUN, capability_tags=tuple(sorted(tags)), **fields)


def gang(name: str, num_nodes: int, arrival: int = 1, **fields: Any) -> Gang:
    """A training gang, by default of `RUN`."""
    fields.setdefault("tag", "train")
    fields.setdefault("run_id", RUN)
    return Gang(gang_id=name, num_nodes=num_nodes, arrival=arrival, **fields)


def after(
    state: State,
    change: Callable[[StateTransaction], object],
    policy: AllocationPolicy = PreemptivePolicy(),  # noqa: B008 -- frozen
    now: float = 0.0,
) -> State:
    """The state after one change."""
    tx = StateTransaction(state, policy, now)
    change(tx)
    return tx.state


@asynccontextmanager
async def in_memory(config: SchedulerConfig) -> AsyncIterator[Service]:
    """The scheduler's service on the in-memory oracle."""
    yield await service(config, MemoryStore(limits.MAX_EVENTS))


@asynccontextmanager
async def running_scheduler(
    **settings: Any,
) -> AsyncIterator[tuple[int, SchedulerServiceAsyncStub]]:
    """A scheduler in this process; gives its port and a stub. `settings` may name limits."""
    given, constants = split("scheduler.limits", {"redis_url": "redis://oracle", **settings})
    config = SchedulerConfig(port=0, drain_seconds=0.5, **given)
    with changed("scheduler.limits", constants):
        async with (
            build(config) if "redis_url" in settings else in_memory(config) as served,
            started(served, config, "scheduler") as port,
            connect(f"127.0.0.1:{port}") as channel,
        ):
            yield port, async_stub(SchedulerServiceStub, channel)


class Process:
    """A separate seamflow process, to kill, freeze and restart.

    Args:
        module: what `python -m` runs.
        folder: holds its port file and log.
        settings: its flags by name.
    """

    def __init__(self, module: str, folder: Path, **settings: object) -> None:
        self._port_file = folder / f"{module}.port"
        self._log = folder / f"{module}.log"
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        self._command = [sys.executable, "-m", module, *flags]
        self.port = free_port()
        self.popen: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it and wait until it serves; a restart takes the same port."""
        self._port_file.unlink(missing_ok=True)
        path = os.pathsep.join([str(ROOT / "sdk"), str(ROOT)])
        environment = os.environ | {"SEAMFLOW_PORT_FILE": str(self._port_file), "PYTHONPATH": path}
        command = [*self._command, f"--port={self.port}"]
        with self._log.open("ab") as log:
            self.popen = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        while not self._port_file.exists():
            assert self.popen.poll() is None, self._log.read_text()
            await asyncio.sleep(0.02)

    def end(self, number: int) -> int:
        """Send signal `number` and wait for its exit code; nothing happens if it has ended."""
        assert self.popen is not None
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.popen.wait()


async def register(
    stub: SchedulerServiceAsyncStub, name: str, *tags: str, priority: float = 0.0
) -> pb.Assignment:
    """Register a node of `RUN`; gives its assignment."""
    request = pb.RegisterNodeRequest(
        node_id=name, run_id=RUN, capability_tags=tags, train_priority=priority
    )
    return (await stub.RegisterNode(request)).assignment


async def heartbeat(
    stub: SchedulerServiceAsyncStub,
    name: str,
    epoch: int,
    state: pb.NodeState.ValueType = pb.NODE_STATE_ACTIVE,
    wait: float = 0.0,
) -> pb.Assignment:
    """Report `state` for `epoch` of node `name`; the assignment of the answer."""
    request = pb.HeartbeatRequest(
        node_id=name,
        reported_epoch=epoch,
        known_epoch=epoch,
        state=state,
        wait=to_duration(wait),
    )
    return (await stub.Heartbeat(request)).assignment


async def request_nodes(
    stub: SchedulerServiceAsyncStub,
    name: str,
    num_nodes: int = 1,
    wait: float = 0.0,
    node_ids: Sequence[str] = (),
) -> pb.RequestNodesResponse:
    """Ask for training nodes of `RUN`."""
    request = pb.RequestNodesRequest(
        run_id=RUN,
        gang_id=name,
        tag="train",
        num_nodes=num_nodes,
        wait=to_duration(wait),
        node_ids=node_ids,
    )
    return await stub.RequestNodes(request)


async def release_nodes(stub: SchedulerServiceAsyncStub, name: str) -> None:
    """Give a gang of `RUN` back."""
    await stub.ReleaseNodes(pb.ReleaseNodesRequest(run_id=RUN, gang_id=name))


async def list_nodes(stub: SchedulerServiceAsyncStub) -> dict[str, pb.Node]:
    """All nodes by name."""
    return {entry.node_id: entry for entry in (await stub.ListNodes(pb.ListNodesRequest())).nodes}
