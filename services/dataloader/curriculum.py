"""What success rates of earlier epochs decide: which tasks an epoch has, and their group sizes.

Tasks that always fail or always succeed teach nothing: some epochs pass them over. With dynamic
group sizes there are as many rollouts per task as one success probably takes: easy tasks need few
and hard ones many, as in ESRL's dynamic sampling (arXiv 2308.02223). ESRL estimates success before
each step; here the estimate is from the task's rollouts of earlier epochs, as recorded by the
trajectory manager.
"""

from __future__ import annotations

import math
from hashlib import blake2b

from services.chassis import metrics
from services.dataloader.config import DataloaderConfig
from services.dataloader.success_rates import SuccessRates

_BYTES = 8


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
