"""Wires the node agent together: `python -m services.node_agent`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from services.chassis.clients import channel
from services.chassis.server import Service, run
from services.node_agent.activities import ACTIVITIES
from services.node_agent.agent import NodeAgent
from services.node_agent.config import NodeAgentConfig
from services.node_agent.lease import Lease
from services.node_agent.switcher import Switcher

__all__ = ["build", "main"]


def main() -> None:
    """Serve until a signal."""
    run("node_agent", NodeAgentConfig, build)


@asynccontextmanager
async def build(
    config: NodeAgentConfig, agent_class: type[NodeAgent] = NodeAgent
) -> AsyncIterator[Service]:
    """Connect to the scheduler and to the node's workers."""
    async with AsyncExitStack() as channels:
        lease = Lease(time.monotonic)
        activities = {
            tag: ACTIVITIES[tag](await channels.enter_async_context(channel(config, address)))
            for tag, address in config.workers.items()
        }
        switcher = Switcher(
            activities,
            may_activate=lambda: not agent.lease_ran_out(),
            clock=time.monotonic,
            recheck_seconds=config.recheck_seconds,
        )
        agent = agent_class(
            registration=_registration(config),
            scheduler=await channels.enter_async_context(channel(config, config.scheduler)),
            switcher=switcher,
            lease=lease,
            clock=time.monotonic,
        )

        async def is_registered() -> bool:
            return agent.registered.is_set()

        yield Service(background=[agent.run], ready=is_registered, drain=agent.drain)


def _registration(config: NodeAgentConfig) -> pb.RegisterNodeRequest:
    return pb.RegisterNodeRequest(
        node_id=config.node_id,
        run_id=config.run_id,
        capability_tags=config.capability_tags,
        workers=[pb.Worker(tag=tag, address=address) for tag, address in config.workers.items()],
        train_priority=config.train_priority,
    )
