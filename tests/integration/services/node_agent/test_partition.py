"""A node cut off from the scheduler stops before its work is given to others."""

from __future__ import annotations

from contextlib import AsyncExitStack

import grpc
import pytest
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from services.node_agent.agent import NodeAgent
from tests.lib.gate import Gate
from tests.lib.node_agent.scripted_scheduler import ScriptedScheduler
from tests.lib.node_agent.support import Workers, active, agent_config, running_agent, state_of
from tests.lib.node_agent.unfenced import UnfencedAgent
from tests.lib.scheduler.support import list_nodes, request_nodes, running_scheduler


async def test_a_partitioned_node_stops_before_its_lease_expires_at_the_scheduler() -> None:
    """Its trainer is suspended by then; after the partition it comes back under a new epoch.

    Negative control: the same node under an agent without a lease still trains.
    """
    agents: dict[str, type[NodeAgent]] = {"fenced": NodeAgent, "unfenced": UnfencedAgent}
    async with (
        running_scheduler(lease_seconds=1.0, lease_margin_seconds=1.0) as (port, stub),
        AsyncExitStack() as stack,
    ):
        workers, networks = {}, []
        for name, agent in agents.items():
            workers[name] = Workers()
            networks.append(Gate(port))
            address = await stack.enter_async_context(workers[name].serving())
            await stack.enter_async_context(networks[-1].serving())
            config = agent_config(name, networks[-1].port, address)
            await stack.enter_async_context(running_agent(config, agent))
        assert (await request_nodes(stub, "g", num_nodes=2, wait=20)).granted
        before = await list_nodes(stub)

        for network in networks:
            network.cut()
        for name in agents:
            await state_of(stub, name, pb.NODE_STATE_LOST)
        assert workers["fenced"].journal.entries[-1] == "suspended"
        assert workers["unfenced"].journal.entries[-1] == "train", "negative control"

        for network in networks:
            network.heal()
        for name in agents:
            await active(stub, name, "train")
            after = (await list_nodes(stub))[name].assignment.epoch
            assert after > before[name].assignment.epoch
        assert workers["fenced"].journal.entries[-1] == "train"


async def test_a_forgotten_node_is_fenced_while_it_cannot_register() -> None:
    """Its registration is void and the scheduler is gone: the lease runs out all the same."""
    workers, scheduler = Workers(), ScriptedScheduler(lease_seconds=1)
    async with (
        scheduler.serving() as port,
        workers.serving() as address,
        running_agent(agent_config("a", port, address)),
    ):
        await scheduler.until_active(await scheduler.assign("train"))
        scheduler.is_away = True
        await workers.journal.until(lambda entries: entries[-1] == "suspended")
        scheduler.is_away = False
        await workers.journal.until(lambda entries: entries[-1] == "train")


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_a_rollout_only_node_continues_without_a_lease(code: grpc.StatusCode) -> None:
    """No gang waits for its device, and its tokens are fenced by their turns' epochs.

    A scheduler that ends cancels what it has not begun to answer.
    """
    workers, scheduler = Workers(), ScriptedScheduler(lease_seconds=1, tag="rollout")
    async with (
        scheduler.serving() as port,
        workers.serving() as address,
        running_agent(agent_config("a", port, address, ("rollout",))),
    ):
        await scheduler.until_active()
        scheduler.refusal, scheduler.is_away = code, True
        await scheduler.until_refused(10)
        scheduler.is_away = False
        await scheduler.until_active()
        assert workers.journal.entries == []
