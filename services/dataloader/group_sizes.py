"""Dynamic group sizes: as many rollouts per task as one success probably takes.

Easy tasks need few samples and hard ones need many, as in ESRL's dynamic sampling (arXiv
2308.02223). ESRL estimates success before each step; here the estimate is from the task's rollouts
of earlier epochs, as recorded by the trajectory manager.
"""

from __future__ import annotations

import math

from services.dataloader.config import DataloaderConfig
from services.dataloader.success_rates import SuccessRates


class GroupSizes:
    """The group sizes that follow from the success rates of tasks."""

    def __init__(self, config: DataloaderConfig, rates: SuccessRates) -> None:
        self._config, self._rates = config, rates

    async def refresh(self) -> None:
        """Update the success rates."""
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
