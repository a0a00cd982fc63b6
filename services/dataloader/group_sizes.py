"""How many rollouts each task gets: as many as it takes for one of them to succeed.

What a policy does well needs few samples and what it seldom does needs many, as in ESRL's dynamic
sampling (arXiv 2308.02223). There skill is estimated before each step; here it is what the task's
rollouts of earlier epochs came to, as the trajectory manager has recorded them.
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

_LOOK_SECONDS = 2.0
_PATIENCE_SECONDS = 10.0
"""A look that takes longer goes on with the next one: tasks have to be submitted."""
_MEMORY = 0.9
"""Weight of a task's rollout before, against 1 for its newest: the policy changes."""


class GroupSizes:
    """Learns how often each task succeeds.

    Nothing is kept on disk: after a restart the newest rollouts of the run are read again.
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
        self._looked = -math.inf
        self._outcomes: dict[str, tuple[float, float]] = {}  # task -> successes, rollouts; decayed

    async def look(self) -> None:
        """Learn what has ended since; at most every few seconds, and given up after some."""
        if self._clock() < self._looked + _LOOK_SECONDS:
            return
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                async for headers in self._closed.new():
                    for header in headers:
                        self._learn(header)
        except (NotFoundError, TimeoutError) as error:
            get_logger().info("sizes_as_before", detail=str(error))
        self._looked = self._clock()

    def of(self, task_id: str) -> int:
        """Rollouts that the task should get; as many as any, if none of it has ended yet."""
        config = self._config
        successes, rollouts = self._outcomes.get(task_name(task_id), (0.0, 0.0))
        if rollouts == 0:
            return config.num_samples
        # Half a success and half a failure are added: nothing is certain (Jeffreys' prior).
        enough = enough_samples((successes + 0.5) / (rollouts + 1), config.success_chance)
        return min(max(enough, config.min_samples), config.max_samples)

    def _learn(self, header: trajectory_pb2.Trajectory) -> None:
        """A rollout without the reward tells nothing: one that failed, say."""
        wanted = self._config.success_reward
        found = [each.value for each in header.rewards if each.name == wanted and not each.turn_id]
        if found:
            name = task_name(header.group_id)
            successes, rollouts = self._outcomes.get(name, (0.0, 0.0))
            success = min(max(found[0], 0.0), 1.0)
            self._outcomes[name] = _MEMORY * successes + success, _MEMORY * rollouts + 1


def enough_samples(success: float, chance: float) -> int:
    """The least n with 1 - (1 - success)^n >= chance.

    Args:
        success: probability that one sample succeeds, between 0 and 1.
        chance: wanted probability that at least one of n does, between 0 and 1.
    """
    return math.ceil(math.log1p(-chance) / math.log1p(-success))
