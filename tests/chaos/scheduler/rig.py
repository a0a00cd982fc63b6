"""A pool under load: Redis, a scheduler, nodes of real processes, and gangs that come and go.

Every connection that a scenario cuts goes through a gate: each node's to the scheduler, and the
scheduler's to Redis.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub

from bench.harness import processes
from bench.harness.constants import VARIABLE
from bench.harness.processes import Server
from bench.harness.redis_process import free_port
from tests.chaos.calls import call_retrying_async
from tests.chaos.scheduler.audit import Entry, read_audit
from tests.chaos.scheduler.gangs import RUN, Driver, Pace, num_partial
from tests.chaos.scheduler.ledger import Event, Ledger, read_events
from tests.chaos.store.rig import Setting
from tests.lib.gate import Gate

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

_LOOK_SECONDS = 0.05
_TIMEOUT_SECONDS = 120.0
_SAMPLE_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """How long a node may be silent."""

    seconds: float
    """The lease of node agents."""
    margin: float
    """What the scheduler waits on top."""

    @property
    def past(self) -> float:
        """Seconds after which a silent node was lost for sure."""
        return self.seconds * 1.25 + self.margin


CAREFUL = Lease(seconds=10.0, margin=2.0)
"""What the scheduler comes with."""
QUICK = Lease(seconds=3.0, margin=1.0)
"""For work that has to be elsewhere within 10 seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What runs; anything but the default is a negative control."""

    scheduler: str = "scheduler"
    """Module of the scheduler."""
    agent: str = "services.node_agent"
    """Module of the node agents."""
    policy: str = "preemptive"
    """Allocation policy."""
    worker_flags: tuple[str, ...] = ()
    """For the workers."""
    durable: bool = True
    """Whether the scheduler has a Redis; without one a restart forgets everything."""


@dataclass(slots=True, kw_only=True)
class ChaosNode:
    """The processes of one node."""

    name: str
    """Node."""
    gate: Gate
    """Its way to the scheduler."""
    worker: Server
    """Its workers."""
    agent: Server
    """Its agent."""


@dataclass(slots=True, kw_only=True)
class Rig:
    """What a scenario breaks."""

    setting: Setting
    """What the scenario was given."""
    lease: Lease
    """How long a node may be silent."""
    variant: Variant
    """What runs."""
    ledger: Ledger
    """Where everything is written down."""
    store_gate: Gate
    """The scheduler's way to Redis."""
    driver_gate: Gate
    """The gangs' way to the scheduler."""
    scheduler: Server
    """The newest one."""
    redis_port: int
    """Redis itself, behind the gates."""
    stack: AsyncExitStack
    """Ends what is added while it runs."""
    stub: SchedulerServiceAsyncStub
    """Calls to the newest scheduler."""
    random: Random
    """Chooses what is struck, and when."""
    nodes: list[ChaosNode] = field(default_factory=list)
    """Of the pool."""
    gangs: dict[Driver, asyncio.Task[None]] = field(default_factory=dict)
    """Those that come and go."""

    async def add_gate(self, target: int | None = None) -> Gate:
        """One more way, to the scheduler if nothing else is said."""
        gate = Gate(self.scheduler.port if target is None else target)
        return await self.stack.enter_async_context(gate.serving())

    def add(self, process: Server) -> Server:
        """One more process, to be ended with the others."""
        self.stack.push(process)
        return process

    def mark(self, event: str, node: str = "") -> None:
        """Write down what the scenario does to a node, or to the scheduler."""
        self.ledger.record(event, node=node)

    async def list_nodes(self) -> Sequence[pb.Node]:
        """All nodes."""
        answer, _ = await call_retrying_async(self.stub.ListNodes, pb.ListNodesRequest())
        nodes: Sequence[pb.Node] = answer.nodes
        return nodes

    async def settled(self) -> None:
        """Return when every node has taken up its assignment."""
        await until(self._all_taken_up, "all nodes have taken up their assignments")

    async def in_gangs(self, count: int) -> list[ChaosNode]:
        """`count` nodes at random, those that work for a gang first; waits until somebody does."""
        busy: set[str] = set()

        async def somebody_works() -> bool:
            listed = await self.list_nodes()
            busy.update(n.node_id for n in listed if n.assignment.gang_id and _taken_up(n))
            return bool(busy)

        await until(somebody_works, "a gang has nodes")
        self.random.shuffle(self.nodes)
        return sorted(self.nodes, key=lambda node: node.name not in busy)[:count]

    async def history(self) -> tuple[list[Event], list[Entry]]:
        """Let the gangs end, and read everything."""
        for driver in self.gangs:
            driver.end()
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            await asyncio.gather(*self.gangs.values())
        audit = await read_audit(self.stub)
        lines = (json.dumps(asdict(entry)) + "\n" for entry in audit)
        (self.setting.folder / "audit.jsonl").write_text("".join(lines))
        return read_events(self.ledger.path), audit

    async def start_node(self, node: ChaosNode) -> None:
        """Start a dead node's processes."""
        self.mark("start", node.name)
        node.worker.start()
        await listening(node.worker)
        node.agent.start()

    def kill_node(self, node: ChaosNode) -> None:
        """The machine is gone."""
        node.agent.kill()
        node.worker.kill()
        self.mark("death", node.name)

    def freeze(self, node: ChaosNode) -> None:
        """Stop its agent where it stands."""
        node.agent.send(signal.SIGSTOP)
        self.mark("freeze", node.name)

    def wake(self, node: ChaosNode) -> None:
        """Resume its agent."""
        self.mark("wake", node.name)
        node.agent.send(signal.SIGCONT)

    async def _all_taken_up(self) -> bool:
        nodes = await self.list_nodes()
        return len(nodes) == len(self.nodes) and all(map(_taken_up, nodes))


@asynccontextmanager
async def pool(
    setting: Setting,
    *,
    lease: Lease,
    num_nodes: int = 8,
    paces: Sequence[Pace],
    variant: Variant | None = None,
) -> AsyncIterator[Rig]:
    """Start everything, with one driver of gangs per pace; end it all afterwards."""
    variant = variant or Variant()
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(processes.redis_server(setting.folder / "redis"))
        ledger = Ledger(setting.folder)
        stack.callback(ledger.close)
        store_gate = await stack.enter_async_context(Gate(redis.port).serving())
        scheduler = scheduler_server(setting.folder, store_gate.port, lease, variant)
        stack.push(scheduler)
        scheduler.start()
        driver_gate = await stack.enter_async_context(Gate(scheduler.port).serving())
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{driver_gate.port}", options=_OPTIONS)
        await stack.enter_async_context(channel)
        rig = Rig(
            setting=setting,
            lease=lease,
            variant=variant,
            ledger=ledger,
            store_gate=store_gate,
            driver_gate=driver_gate,
            scheduler=scheduler,
            redis_port=redis.port,
            stack=stack,
            stub=async_stub(SchedulerServiceStub, channel),
            random=Random(setting.seed),
        )
        await listening(scheduler)
        await _start_nodes(rig, num_nodes)
        async with _load(rig, paces):
            yield rig


def scheduler_server(folder: Path, redis_port: int, lease: Lease, variant: Variant) -> Server:
    """`python -m scheduler` on a Redis, not started."""
    port = free_port()
    settings = {
        "SEAMFLOW_SCHEDULER_PORT": str(port),
        "SEAMFLOW_SCHEDULER_ADMIN_PORT": "-1",
        "SEAMFLOW_SCHEDULER_LEASE_SECONDS": str(lease.seconds),
        VARIABLE: json.dumps({"scheduler.limits": {"LEASE_MARGIN_SECONDS": lease.margin}}),
        "SEAMFLOW_SCHEDULER_POLICY": variant.policy,
        "SEAMFLOW_SCHEDULER_DRAIN_SECONDS": "1",
    }
    if variant.durable:
        settings["SEAMFLOW_SCHEDULER_REDIS_URL"] = f"redis://127.0.0.1:{redis_port}/0"
    command = processes.python("bench.harness.constants", variant.scheduler)
    return Server(f"scheduler-{port}", command, folder, processes.environment(settings), port)


def node_agent(rig: Rig, name: str, gate: Gate, worker: Server) -> Server:
    """`python -m services.node_agent` for node `name`, not started."""
    port = free_port()
    settings = {
        "SEAMFLOW_NODE_AGENT_PORT": str(port),
        "SEAMFLOW_NODE_AGENT_ADMIN_PORT": "-1",
        "SEAMFLOW_NODE_AGENT_NODE_ID": name,
        "SEAMFLOW_NODE_AGENT_RUN_ID": RUN,
        "SEAMFLOW_NODE_AGENT_CAPABILITY_TAGS": "rollout,score,train",
        "SEAMFLOW_NODE_AGENT_SCHEDULER": f"127.0.0.1:{gate.port}",
        "SEAMFLOW_NODE_AGENT_ROLLOUT_SERVER": worker.address,
        "SEAMFLOW_NODE_AGENT_TRAINER": worker.address,
        "SEAMFLOW_NODE_AGENT_WORKERS": json.dumps([{"tag": "score", "address": worker.address}]),
        VARIABLE: json.dumps({"services.node_agent.cli": {"RECHECK_SECONDS": 1.0}}),
    }
    given = processes.environment(settings)
    command = processes.python("bench.harness.constants", rig.variant.agent)
    return Server(f"agent-{name}-{port}", command, rig.setting.folder, given, port)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Return when `condition` holds.

    Raises:
        RuntimeError: it does not within two minutes.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            while not await condition():
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise RuntimeError(f"not within {_TIMEOUT_SECONDS:g} s: {what}") from None


async def listening(server: Server) -> None:
    """Return when it accepts connections."""
    await asyncio.to_thread(server.wait)


async def _start_nodes(rig: Rig, count: int) -> None:
    folder = rig.setting.folder
    for index in range(count):
        name = f"node-{index}"
        gate = await rig.add_gate()
        port = free_port()
        flags = ("--node", name, "--port", str(port), "--folder", str(folder))
        command = processes.python(
            "tests.chaos.scheduler.worker", *flags, *rig.variant.worker_flags
        )
        worker = Server(f"worker-{name}", command, folder, processes.environment(), port)
        node = ChaosNode(
            name=name, gate=gate, worker=worker, agent=node_agent(rig, name, gate, worker)
        )
        for process in (worker, node.agent):
            rig.add(process).start()
        rig.nodes.append(node)
    for node in rig.nodes:
        await listening(node.worker)
    await rig.settled()


@asynccontextmanager
async def _load(rig: Rig, paces: Sequence[Pace]) -> AsyncIterator[None]:
    """Gangs come and go until the context ends."""
    async with asyncio.TaskGroup() as tasks:
        for index, pace in enumerate(paces):
            random = Random(f"{rig.setting.seed}-{index}")
            driver = Driver(f"gang-{index}", rig.stub, rig.ledger, pace, random)
            rig.gangs[driver] = tasks.create_task(driver.run())
        looking = tasks.create_task(_look_for_partial_gangs(rig))
        try:
            yield
        finally:
            for task in (*rig.gangs.values(), looking):
                task.cancel()


async def _look_for_partial_gangs(rig: Rig) -> None:
    while True:
        with suppress(grpc.aio.AioRpcError):
            answer = await rig.stub.ListNodes(pb.ListNodesRequest(), timeout=1.0)
            for _ in range(num_partial(answer.nodes)):
                rig.mark("partial")
        await asyncio.sleep(_SAMPLE_SECONDS)


def _taken_up(node: pb.Node) -> bool:
    at_rest = (pb.NODE_STATE_ACTIVE, pb.NODE_STATE_IDLE)
    return node.state in at_rest and node.reported_epoch == node.assignment.epoch


_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 300)]
