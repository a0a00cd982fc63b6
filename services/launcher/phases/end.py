"""The end of a run: agents notice it, and nodes come back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from seamflow.retry import retrying
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trajectory.v1 import run_service_pb2 as run_pb

from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.service_clients import Services
from services.launcher.supervisor import Supervisor

_AGENT_END_SECONDS = 10.0
_AGENT_POLL_SECONDS = 2.0
_REFRESH_SECONDS = 0.5


async def end_run(
    config: LauncherConfig,
    plans: Mapping[str, ProcessPlan],
    processes: Supervisor,
    services: Services,
) -> None:
    """End the run, and give agents with programs of their own time to notice it."""
    request = run_pb.EndRunRequest(run_id=services.run_id)
    await retrying(lambda: services.runs.EndRun(request))
    if "agent" in plans:
        await processes.stop("agent", patience=_AGENT_END_SECONDS)
    elif config.are_agents_outside:
        await _wait_for_rollouts(services)


async def _wait_for_rollouts(services: Services) -> None:
    """Wait for the rollouts of agents from outside, then until they have asked for more."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_AGENT_END_SECONDS):
            ready = (await services.snapshot()).readiness
            while ready is None or ready.num_running_rollouts:
                await asyncio.sleep(_REFRESH_SECONDS)
                ready = (await services.snapshot()).readiness
    await asyncio.sleep(_AGENT_POLL_SECONDS)


async def drain_nodes(services: Services) -> None:
    """Return every lent node before the processes end."""
    for node in await _present(services):
        request = scheduler_pb.DrainNodeRequest(node_id=node.node_id, drain=True)
        await retrying(lambda request=request: services.scheduler.DrainNode(request))  # type: ignore[misc]
    while any(
        node.assignment.epoch != node.reported_epoch or node.assignment.tag
        for node in await _present(services)
    ):
        await asyncio.sleep(_REFRESH_SECONDS / 5)
    await asyncio.sleep(_REFRESH_SECONDS)  # the change feed's last entries


async def _present(services: Services) -> list[scheduler_pb.Node]:
    """The nodes but those that are lost, such as those of a host that has left."""
    nodes = (await services.snapshot()).nodes or ()
    return [node for node in nodes if node.state != scheduler_pb.NODE_STATE_LOST]
