"""Tasks that always fail or always succeed teach nothing: some epochs pass them over."""

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
        """Update the success rates."""
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
