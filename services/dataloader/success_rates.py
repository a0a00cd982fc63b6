"""How often tasks succeeded lately, by the rollouts that the trajectory manager recorded."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio
from seamflow.errors import NotFoundError
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from services.chassis.log import get_logger
from services.dataloader.config import DataloaderConfig
from services.lib.closed_rollouts import ClosedRollouts, task_name

_REFRESH_SECONDS = 2.0
_REFRESH_TIMEOUT_SECONDS = 10.0
"""A refresh that takes longer is continued by the next one, so that it does not block tasks."""
_MEMORY = 0.9
"""Decay of a task's older rollouts, as the policy changes."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Closed rollouts of one task."""

    successes: float = 0.0
    """Sum of their rewards from 0 to 1; older ones count less."""
    rollouts: float = 0.0
    """Their number, decayed in the same way."""
    count: int = 0
    """Their number."""

    @property
    def rate(self) -> float:
        """Recent success rate, from 0 to 1; raises `ZeroDivisionError` without rollouts."""
        return self.successes / self.rollouts

    def added(self, success: float) -> Outcomes:
        return Outcomes(
            _MEMORY * self.successes + success, _MEMORY * self.rollouts + 1, self.count + 1
        )


class SuccessRates:
    """Outcomes of tasks over all epochs.

    Kept in memory only: after a restart the newest rollouts of the run are read again.
    """

    def __init__(
        self,
        config: DataloaderConfig,
        channel: grpc.aio.Channel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`channel` leads to the trajectory manager; `clock` gives seconds."""
        # The generated constructor is typed for blocking channels.
        store = async_stub(TrajectoryServiceStub, channel)
        self._closed = ClosedRollouts(store, config.run_id)
        self._reward = config.success_reward
        self._clock = clock
        self._refreshed = -math.inf
        self._outcomes: dict[str, Outcomes] = {}

    async def refresh(self) -> None:
        """Add newly closed rollouts, at most every 2 s and for at most 10 s."""
        if self._clock() < self._refreshed + _REFRESH_SECONDS:
            return
        try:
            async with asyncio.timeout(_REFRESH_TIMEOUT_SECONDS):
                async for headers in self._closed.new():
                    for header in headers:
                        self._add(header)
        except (NotFoundError, TimeoutError) as error:
            get_logger().info("success_rates_not_refreshed", detail=str(error))
        self._refreshed = self._clock()

    def of(self, task_id: str) -> Outcomes:
        """Outcomes of the task in all its epochs."""
        return self._outcomes.get(task_name(task_id), Outcomes())

    def _add(self, header: trajectory_pb2.Trajectory) -> None:
        """Count a rollout, unless it lacks the reward, as failed ones do."""
        found = [each.value for each in header.rewards.rewards if each.name == self._reward]
        if found:
            success = min(max(sum(found), 0.0), 1.0)
            self._outcomes[task_name(header.group_id)] = self.of(header.group_id).added(success)
