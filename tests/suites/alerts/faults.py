"""A real fault for each alert: what is done to the processes, and which alerts follow from it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
import redis.asyncio
from seamflow.channel import connect
from seamflow.errors import SeamflowError
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub

from tests.suites.alerts.alert_rig import RUN_ID, AlertRig
from tests.suites.alerts.faulty_engine import DIES, NAN, NO_WEIGHTS

Until = Callable[[], Awaitable[None]]
"""Waits until the alerts of the fault fire; a TimeoutError says that they do not."""
_NO_END = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is broken; processes are whole again at the end of `cause`."""

    name: str
    fires: frozenset[str]
    """Alerts that have to fire."""
    cause: Callable[[AlertRig, Until], Awaitable[None]]
    may_fire: frozenset[str] = frozenset()
    """Other alerts that it may cause."""


async def _rejected(rig: AlertRig, until: Until) -> None:
    """Agents give several rewards, and none under the name that the trainer asks for."""
    async with rig.playing():
        for _ in range(7):
            await rig.group(rewards=({"score": 0.0, "style": 1.0},) * 2)
        await until()


async def _discarded(rig: AlertRig, until: Until) -> None:
    """Agents give every rollout the same reward."""
    async with rig.playing():
        await asyncio.gather(*(rig.group(rewards=(1.0, 1.0)) for _ in range(12)))
        await until()


async def _weights(rig: AlertRig, until: Until) -> None:
    """One rollout server cannot read weights."""
    async with rig.playing(), _engine(rig, NO_WEIGHTS):
        await until()


async def _nan(rig: AlertRig, until: Until) -> None:
    """An engine gives log-probs that are no numbers."""
    async with rig.playing(), _engine(rig, NAN):
        await until()


async def _dying(rig: AlertRig, until: Until) -> None:
    """An engine dies four times, each time after it has lived for a while."""
    async with rig.playing():
        for _ in range(4):
            rig.fault_file.write_text(DIES)
            while rig.fault_file.exists():
                await asyncio.sleep(0.2)
            await asyncio.sleep(6)
        await until()


async def _node_lost(rig: AlertRig, until: Until) -> None:
    """A node agent is killed."""
    await rig.kill("node-agent-a")
    await until()
    await rig.start("node-agent-a")


async def _node_overdue(rig: AlertRig, until: Until) -> None:
    """A rollout server hangs while its node is wanted for other work."""
    rig.signal("rollout-server-b", signal.SIGSTOP)
    async with connect(rig["scheduler"].address) as channel:
        stub = async_stub(SchedulerServiceStub, channel)
        request = scheduler_pb.RequestNodesRequest(
            run_id=RUN_ID, gang_id="scorers", tag="score", num_nodes=1
        )
        try:
            await stub.RequestNodes(request)
            await until()
        finally:
            rig.signal("rollout-server-b", signal.SIGCONT)
            await stub.ReleaseNodes(
                scheduler_pb.ReleaseNodesRequest(run_id=RUN_ID, gang_id="scorers")
            )


async def _gateway_gone(rig: AlertRig, until: Until) -> None:
    """The rollout gateway is killed while agents call over HTTP: they are answered in a minute."""
    url = f"http://127.0.0.1:{rig.http_port}/rollouts"
    await rig.kill("rollout-gateway")
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:

        async def start() -> None:
            async with session.post(url, json={}):
                pass

        async def agents() -> None:
            calls.add(tasks.create_task(start()))

        calls = set[asyncio.Task[None]]()
        async with _repeated(agents, pause=0.5):
            await until()
        for call in calls:
            call.cancel()
    await rig.start("rollout-gateway")


async def _broken_key(rig: AlertRig, until: Until) -> None:
    """Something writes over the store's keys of a run."""
    run_id = "broken"
    await rig.create_run(run_id)
    async with redis.asyncio.from_url(rig.redis.url) as store:
        for key in await store.keys(f"*{run_id}*"):
            await store.delete(key)
            await store.rpush(key, "x")
        async with connect(rig["trajectory-manager"].address) as channel:
            stub = async_stub(RunServiceStub, channel)
            async with _repeated(lambda: stub.GetRun(run_pb.GetRunRequest(run_id=run_id))):
                await until()
        await store.delete(*await store.keys(f"*{run_id}*"))


async def _store_full(rig: AlertRig, until: Until) -> None:
    """The store's memory is full while turns are sampled."""
    async with (
        redis.asyncio.from_url(rig.redis.url) as store,
        _repeated(lambda: rig.group(tokens=3000)),
    ):
        await asyncio.sleep(3)
        await store.config_set("maxmemory", 1)
        try:
            await until()
        finally:
            await store.config_set("maxmemory", 0)


async def _store_slow(rig: AlertRig, until: Until) -> None:
    """The store's disk stands still again and again: the store with it."""

    async def stall() -> None:
        rig.redis.freeze()
        try:
            await asyncio.sleep(2.6)
        finally:
            rig.redis.thaw()

    async with rig.playing(), _repeated(stall):
        await until()


async def _partial_batches(rig: AlertRig, until: Until) -> None:
    """Groups come one by one to a trainer that does not wait for the second."""
    await asyncio.to_thread(rig["trainer"].stop)
    rig.add_trainer(_NO_END, batch__timeout_seconds=0.1)
    await rig.start("trainer")
    async with _repeated(rig.group, pause=3.0):
        await until()
    await asyncio.to_thread(rig["trainer"].stop)
    rig.add_trainer(_NO_END)
    await rig.start("trainer")


async def _no_servers(rig: AlertRig, until: Until) -> None:
    """All rollout servers are killed while agents have many turns; one slow one comes back."""
    servers = ("rollout-server-a", "rollout-server-b")
    await rig.kill(*servers)
    async with asyncio.TaskGroup() as tasks:

        async def play() -> None:
            with suppress(SeamflowError):
                await rig.group()

        waiting = [tasks.create_task(play()) for _ in range(30)]
        await asyncio.sleep(66)
        rig.add_server(servers[0], engine="fake", max_running=1, fake_step_seconds=0.4)
        await rig.start(servers[0])
        await until()
        for turn in waiting:
            turn.cancel()
    await rig.kill(servers[0])
    rig.add_server(servers[0], engine="fake")
    await rig.start(*servers)


@asynccontextmanager
async def _engine(rig: AlertRig, fault: str) -> AsyncIterator[None]:
    rig.fault_file.write_text(fault)
    try:
        yield
    finally:
        rig.fault_file.unlink(missing_ok=True)


@asynccontextmanager
async def _repeated(
    call: Callable[[], Awaitable[object]], pause: float = 0.2
) -> AsyncIterator[None]:
    """Make the call again and again while the block runs, whatever comes of it."""

    async def forever() -> None:
        while True:
            with suppress(Exception):
                await call()
            await asyncio.sleep(pause)

    task = asyncio.create_task(forever())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _fault(
    name: str, cause: Callable[[AlertRig, Until], Awaitable[None]], fires: str, may_fire: str = ""
) -> Fault:
    return Fault(
        name=name,
        cause=cause,
        fires=frozenset(fires.split()),
        may_fire=frozenset(may_fire.split()),
    )


FAULTS = (
    _fault("a full store", _store_full, "TokensNotRecorded", "ServersEjected TrainerStalled"),
    _fault("a slow store", _store_slow, "StoreSlow", "TrainerStalled"),
    _fault("groups one by one", _partial_batches, "BatchesTimeOut"),
    _fault(
        "no rollout servers",
        _no_servers,
        "NoRolloutServers TurnsWait TrainerStalled ServiceDown",
    ),
    _fault("equal rewards", _discarded, "GroupsDiscarded"),
    _fault("rewards of another name", _rejected, "GroupsRejected"),
    _fault("an engine that dies", _dying, "EngineRestarts"),
    _fault("log-probs that are no numbers", _nan, "ServersEjected"),
    _fault("weights that cannot be read", _weights, "WeightUpdatesFail WeightsBehind"),
    _fault("a node agent killed", _node_lost, "NodesLost ServiceDown"),
    _fault("a worker that hangs", _node_overdue, "NodesOverdue", "ServiceDown ServersEjected"),
    _fault("keys written over", _broken_key, "CallsFail"),
    _fault("no rollout gateway", _gateway_gone, "HttpCallsFail ServiceDown", "TrainerStalled"),
)
"""In the order in which they are caused. MemoryGrows is shown by recorded series."""
