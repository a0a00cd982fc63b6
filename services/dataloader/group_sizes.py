"""Dynamic group sizes: as many rollouts per task as one success probably takes.

Easy tasks need few samples and hard ones need many, as in ESRL's dynamic sampling (arXiv
2308.02223). ESRL estimates success before each step; here the estimate is from the task's rollouts
of earlier epochs, as recorded by the trajectory manager.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import grpc.aio
from seamflow.errors import NotFoundError
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from services.chassis.log import get_logger
from services.dataloader.config import DataloaderConfig
from services.lib.closed_rollouts import ClosedRollouts, task_name

__all__ = ["GroupSizes", "enough_samples"]

_REFRESH_SECONDS = 2.0
_REFRESH_TIMEOUT_SECONDS = 10.0
"""A refresh that takes longer is continued by the next one, so that it does not block tasks."""
_MEMORY = 0.9
"""Decay of a task's older rollouts, as the policy changes."""


class GroupSizes:
    """Success rates of tasks, and the group sizes that follow from them.

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
        self._config = config
        self._clock = clock
        self._refreshed = -math.inf
        self._outcomes: dict[str, tuple[float, float]] = {}  # task -> successes, rollouts; decayed

    async def refresh(self) -> None:
        """Add newly closed rollouts, at most every 2 s and for at most 10 s."""
        if self._clock() < self._refreshed + _REFRESH_SECONDS:
            return
        try:
            async with asyncio.timeout(_REFRESH_TIMEOUT_SECONDS):
                async for headers in self._closed.new():
                    for header in headers:
                        self._add_outcome(header)
        except (NotFoundError, TimeoutError) as error:
            get_logger().info("group_sizes_not_refreshed", detail=str(error))
        self._refreshed = self._clock()

    def of(self, task_id: str) -> int:
        """Rollouts for the task; the default number if none has closed yet."""
        config = self._config
        successes, rollouts = self._outcomes.get(task_name(task_id), (0.0, 0.0))
        if rollouts == 0:
            return config.num_samples
        # Jeffreys' prior: half a success and half a failure are added.
        enough = enough_samples((successes + 0.5) / (rollouts + 1), config.success_chance)
        return min(max(enough, config.min_samples), config.max_samples)

    def _add_outcome(self, header: trajectory_pb2.Trajectory) -> None:
        """Count a rollout, unless it lacks the reward, as failed ones do."""
        reward = self._config.success_reward
        found = [each.value for each in header.rewards.rewards if each.name == reward]
        if found:
            name = task_name(header.group_id)
            successes, rollouts = self._outcomes.get(name, (0.0, 0.0))
            success = min(max(sum(found), 0.0), 1.0)
            self._outcomes[name] = _MEMORY * successes + success, _MEMORY * rollouts + 1


def enough_samples(success: float, chance: float) -> int:
    """The least n with 1 - (1 - success)^n >= chance.

    Args:
        success: probability that one sample succeeds, between 0 and 1.
        chance: required probability that at least one of n succeeds, between 0 and 1.
    """
    return math.ceil(math.log1p(-chance) / math.log1p(-success))
