"""Records what each step trained on, for people: never in the way of training.

IDLE -> (`start` after a step) RECORDING -> IDLE. A step that finishes meanwhile is not recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.chassis.log import get_logger
from trainer.clients.sample_client import SampleClient
from trainer.config import TrainerConfig
from trainer.data.token_sequence import TokenSequence, without_truncated
from trainer.ranks.rank_group import RankGroup
from trainer.tracking.trained_samples import trained_samples

_RANK_SECONDS = 30.0
"""Longest wait for what the ranks send."""
_RECORD_SECONDS = 60.0
"""Longest time for a step to be received and recorded."""


class SampleRecorder:
    """Sends samples of finished steps to the trajectory manager."""

    def __init__(self, config: TrainerConfig, ranks: RankGroup, samples: SampleClient) -> None:
        self._config = config
        self._ranks, self._samples = ranks, samples
        self._task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the next step will be recorded."""
        is_idle = self._task is None or self._task.done()
        return self._config.tracking.recorded_steps > 0 and is_idle

    def start(
        self, step: int, base_weight_version: int, sequences: Sequence[TokenSequence]
    ) -> None:
        """Record a step, whose rows the ranks were told to send while this was ready."""
        self._task = asyncio.create_task(self._record(step, base_weight_version, sequences))

    async def finish(self) -> None:
        """Wait until nothing is in flight."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _record(
        self, step: int, base_weight_version: int, sequences: Sequence[TokenSequence]
    ) -> None:
        try:
            async with asyncio.timeout(_RECORD_SECONDS):
                await self._send(step, base_weight_version, sequences)
        except Exception as error:  # people miss a step; training must not
            get_logger().warning("trained_samples_not_recorded", step=step, error=str(error))

    async def _send(
        self, step: int, base_weight_version: int, sequences: Sequence[TokenSequence]
    ) -> None:
        values = await self._ranks.trained_rows(step, _RANK_SECONDS)
        algorithm = self._config.algorithm
        samples = await asyncio.to_thread(
            trained_samples,
            without_truncated(sequences) if algorithm.mask_truncated else sequences,
            values,
            reward=algorithm.trained_reward,
            base_weight_version=base_weight_version,
        )
        await self._samples.record_trained(step, samples, self._config.tracking.recorded_steps)
