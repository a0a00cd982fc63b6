"""Recorded trajectories of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator

from seamflow.retry import retrying
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.launcher.service_clients import Services

_PAGE = 250


async def trajectories(
    services: Services, *, headers_only: bool = False
) -> AsyncIterator[trajectory_pb2.Trajectory]:
    """All recorded trajectories of the run, oldest first."""
    token = ""
    while True:
        request = pb.ListTrajectoriesRequest(
            run_id=services.run_id,
            page_size=_PAGE,
            page_token=token,
            headers_only=headers_only,
        )
        page = await retrying(lambda: services.trajectories.ListTrajectories(request))  # noqa: B023
        for trajectory in page.trajectories:
            yield trajectory
        token = page.next_page_token
        if not token:
            return
