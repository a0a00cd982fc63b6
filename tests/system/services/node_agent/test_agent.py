"""A node's life over real gRPC: scheduler, node agent and recording workers."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from seamflow.channel import connect
from seamflow.rollout.v1 import rollout_server_service_pb2 as rollout_pb
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from structlog.testing import capture_logs

from tests.lib.node_agent.support import Workers, active, agent_config, running_agent, state_of
from tests.lib.redis_server import RedisServer, free_port
from tests.lib.scheduler.support import (
    BOTH,
    RUN,
    Process,
    list_nodes,
    release_nodes,
    request_nodes,
    running_scheduler,
)


async def test_lend_and_return_in_order() -> None:
    """The old activity always ends before the new one begins, over three rounds."""
    workers = Workers()
    async with (
        running_scheduler() as (port, stub),
        workers.serving() as address,
        running_agent(agent_config("a", port, address)),
    ):
        await active(stub, "a", "rollout")
        for _ in range(3):
            assert (await request_nodes(stub, "g", wait=10)).granted
            await release_nodes(stub, "g")
            await active(stub, "a", "rollout")
        round_trip = ["ABORT", "release", "train", "suspending", "suspended", "restore", "serve"]
        assert workers.journal.entries == ["suspending", "suspended", *3 * round_trip]
        assert workers.trainer.epochs == sorted(workers.trainer.epochs)


async def test_long_suspension_keeps_the_lease() -> None:
    """A switch much longer than the lease does not lose the node: heartbeats continue."""
    workers = Workers()
    settings = {"lease_seconds": 0.4, "lease_margin_seconds": 0.1}
    async with (
        running_scheduler(**settings) as (port, stub),
        workers.serving() as address,
        running_agent(agent_config("a", port, address)),
    ):
        assert (await request_nodes(stub, "g", wait=10)).granted
        workers.trainer.boundary.clear()
        await release_nodes(stub, "g")
        await workers.journal.until(lambda entries: entries[-1] == "suspending")
        seen = set()
        for _ in range(30):
            seen.add((await list_nodes(stub))["a"].state)
            await asyncio.sleep(0.05)
        assert seen <= {pb.NODE_STATE_DRAINING, pb.NODE_STATE_ACTIVE}
        assert "serve" not in workers.journal.entries
        workers.trainer.boundary.set()
        await active(stub, "a", "rollout")


async def test_late_workers_are_retried() -> None:
    """The node is not ACTIVE before its workers answered."""
    workers = Workers()
    port_later = free_port()
    address = f"127.0.0.1:{port_later}"
    async with (
        running_scheduler() as (port, stub),
        running_agent(agent_config("a", port, address, ("rollout",))),
    ):
        await state_of(stub, "a", pb.NODE_STATE_ACTIVATING)
        async with workers.serving(port_later):
            await active(stub, "a", "rollout")


async def test_rollout_only_node_is_not_switched() -> None:
    """A server that serves already is neither paused nor released at start."""
    workers = Workers()
    async with (
        running_scheduler() as (port, stub),
        workers.serving() as address,
        running_agent(agent_config("a", port, address, ("rollout",))),
    ):
        await active(stub, "a", "rollout")
        assert workers.journal.entries == []


async def test_ending_agent_hands_running_turns_over() -> None:
    """On SIGTERM the rollout server gives its turns up, and the scheduler knows the node leaves."""
    workers = Workers()
    async with running_scheduler() as (port, stub), workers.serving() as address:
        async with running_agent(agent_config("a", port, address, ("rollout",))):
            await active(stub, "a", "rollout")
        assert workers.journal.entries[0] == "ABORT"
        assert (await list_nodes(stub))["a"].assignment.tag == ""


async def test_ending_agent_does_not_wait_for_dead_workers() -> None:
    """Each is called once: if a whole node ends at the same time none answers any more."""
    workers = Workers()
    async with running_scheduler() as (port, stub), AsyncExitStack() as stack:
        async with workers.serving() as address:
            config = agent_config("a", port, address).replace(drain_seconds=60.0)
            await stack.enter_async_context(running_agent(config))
            await active(stub, "a", "rollout")
        with capture_logs() as logs:
            await stack.aclose()
        assert "drain_incomplete" not in {entry["event"] for entry in logs}


async def test_restarted_worker_is_restored_to_its_assignment() -> None:
    """One that starts during another activity is stopped; one that lost its own is activated."""
    workers = Workers()
    async with (
        running_scheduler() as (port, stub),
        workers.serving() as address,
        running_agent(agent_config("a", port, address), recheck_seconds=0.05),
    ):
        assert (await request_nodes(stub, "g", wait=10)).granted
        told = len(workers.journal.entries)
        workers.rollout.state = rollout_pb.SERVER_STATE_SERVING
        await workers.journal.until(lambda entries: entries[told:] == ["ABORT", "release"])
        workers.trainer.suspended = True
        await workers.journal.until(lambda entries: entries[told + 2 :] == ["train"])
        assert (await request_nodes(stub, "g", wait=10)).granted


async def test_switch_time_is_reported() -> None:
    """The switch's seconds reach the scheduler with the report of its end, once."""
    workers = Workers()
    async with (
        running_scheduler() as (port, stub),
        workers.serving() as address,
        running_agent(agent_config("a", port, address)),
    ):
        before = _switches("train")
        assert (await request_nodes(stub, "g", wait=10)).granted
        assert _switches("train") == before + 1


async def test_frozen_agent_fences_itself(tmp_path: Path, redis_server: RedisServer) -> None:
    """SIGSTOP past the lease, the scheduler gone: on waking the trainer is suspended at once.

    Negative control: the same node under an agent without a lease trains on.
    """
    process = Process(
        "scheduler",
        tmp_path,
        redis_url=redis_server.url,
        lease_seconds=1.0,
    )
    await process.start()
    async with AsyncExitStack() as stack:
        stack.callback(process.end, signal.SIGKILL)
        channel = await stack.enter_async_context(connect(f"127.0.0.1:{process.port}"))
        stub = async_stub(SchedulerServiceStub, channel)
        nodes = {}
        for name, module in (("a", "services.node_agent"), ("b", "tests.lib.node_agent.unfenced")):
            workers = Workers()
            address = await stack.enter_async_context(workers.serving())
            agent = Process(module, tmp_path, **_flags(name, process.port, address))
            await agent.start()
            stack.callback(agent.end, signal.SIGKILL)
            nodes[name] = (workers, agent)
        assert (await request_nodes(stub, "g", num_nodes=2, wait=20)).granted

        for _, agent in nodes.values():
            assert agent.popen is not None
            agent.popen.send_signal(signal.SIGSTOP)
        await state_of(stub, "a", pb.NODE_STATE_LOST)
        await state_of(stub, "b", pb.NODE_STATE_LOST)
        process.end(signal.SIGKILL)
        for name in "ba":
            popen = nodes[name][1].popen
            assert popen is not None
            popen.send_signal(signal.SIGCONT)
        await nodes["a"][0].journal.until(lambda entries: entries[-1] == "suspended")
        await _tried_to_reach_the_scheduler(tmp_path / "tests.lib.node_agent.unfenced.log")
        assert nodes["b"][0].journal.entries[-1] == "train", "negative control: it trains on"

        # After the outage both return under new epochs and follow their assignments.
        await process.start()
        again = await stack.enter_async_context(connect(f"127.0.0.1:{process.port}"))
        stub = async_stub(SchedulerServiceStub, again)
        await active(stub, "a", "train")
        await active(stub, "b", "train")
        assert nodes["a"][0].journal.entries[-1] == "train"
        for _, agent in nodes.values():
            assert await asyncio.to_thread(agent.end, signal.SIGTERM) == 0
        assert process.end(signal.SIGTERM) == 0


def _flags(name: str, scheduler_port: int, workers: str) -> dict[str, object]:
    return {
        "node_id": name,
        "run_id": RUN,
        "capability_tags": ",".join(BOTH),
        "scheduler": f"127.0.0.1:{scheduler_port}",
        "rollout_server": workers,
        "trainer": workers,
    }


async def _tried_to_reach_the_scheduler(log: Path) -> None:
    while log.read_text().count("scheduler_unreachable") < 3:
        await asyncio.sleep(0.05)


def _switches(tag: str) -> float:
    from prometheus_client import REGISTRY

    labels = {"tag": tag}
    return REGISTRY.get_sample_value("seamflow_scheduler_switch_seconds_count", labels) or 0.0
