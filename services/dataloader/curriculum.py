"""What success rates of earlier epochs decide: which tasks an epoch has, and their group sizes.

Tasks that always fail or always succeed teach nothing: some epochs pass them over. With dynamic
group sizes there are as many rollouts per task as one success probably takes: easy tasks need few
and hard ones many, as in ESRL's dynamic sampling (arXiv 2308.02223). ESRL estimates success before
each step; here the estimate is from the task's rollouts of earlier epochs, as recorded by the
trajectory manager.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import grpc.aio
from seamflow.errors import NotFoundError
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from services.chassis import metrics
from services.chassis.log import get_logger
from services.dataloader.config import DataloaderConfig
from services.lib.closed_rollouts import ClosedRollouts, task_name

_REFRESH_SECONDS = 2.0
_REFRESH_TIMEOUT_SECONDS = 10.0
"""A refresh that takes longer is continued by the next one, so that it does not block tasks."""
_MEMORY = 0.9
"""Decay of a task's older rollouts, as the policy changes."""

_BYTES = 8


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


class Curriculum:
    """Which tasks are drawn in their epoch.

    A task whose success rate is at `lowest` or below, or at `highest` or above, is drawn in `share`
    of the epochs, so that its rate stays known. In which ones depends on seed, task and epoch
    alone; all others are drawn in each epoch.
    """

    def __init__(self, config: DataloaderConfig, rates: SuccessRates) -> None:
        self._settings, self._seed = config.curriculum, config.seed
        self._rates = rates
        self._passed = metrics.counter(
            "dataloader", "passed_over_tasks_total", "Tasks that the curriculum passed over."
        )

    async def refresh(self) -> None:
        await self._rates.refresh()

    def is_drawn(self, task_id: str) -> bool:
        """Whether the task, whose id has its epoch, is submitted."""
        if self._teaches(task_id) or self._number(task_id) < self._settings.share:
            return True
        self._passed.inc()
        return False

    def _teaches(self, task_id: str) -> bool:
        outcomes = self._rates.of(task_id)
        if outcomes.count < self._settings.min_rollouts:
            return True
        return self._settings.lowest < outcomes.rate < self._settings.highest

    def _number(self, task_id: str) -> float:
        """A number in [0, 1) that is the same after a restart."""
        digest = blake2b(f"{self._seed}:{task_id}".encode(), digest_size=_BYTES).digest()
        return math.ldexp(int.from_bytes(digest, "little"), -8 * _BYTES)


class GroupSizes:
    """The group sizes that follow from the success rates of tasks."""

    def __init__(self, config: DataloaderConfig, rates: SuccessRates) -> None:
        self._config, self._rates = config, rates

    async def refresh(self) -> None:
        await self._rates.refresh()

    def of(self, task_id: str) -> int:
        """Rollouts for the task; the default number if none has closed yet."""
        config, outcomes = self._config, self._rates.of(task_id)
        if not outcomes.count:
            return config.num_samples
        # Jeffreys' prior: half a success and half a failure are added.
        success = (outcomes.successes + 0.5) / (outcomes.rollouts + 1)
        enough = enough_samples(success, config.success_chance)
        return min(max(enough, config.min_samples), config.max_samples)


def enough_samples(success: float, chance: float) -> int:
    """The least n with 1 - (1 - success)^n >= chance.

    Args:
        success: probability that one sample succeeds, between 0 and 1.
        chance: required probability that at least one of n succeeds, between 0 and 1.
    """
    return math.ceil(math.log1p(-chance) / math.log1p(-success))
