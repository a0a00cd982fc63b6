"""Reads the ended turns of a run and refits the length model after a number of them."""

from __future__ import annotations

import asyncio
import time

from seamflow.errors import NotFoundError

from services.chassis import metrics
from services.chassis.log import get_logger
from services.ranker.config import RankerConfig
from services.ranker.learner import Learned, Memory, learn
from services.ranker.turn_feed import TurnFeed

__all__ = ["Ranker"]

_log = get_logger()
_TURNS = metrics.counter("ranker", "turns_total", "Ended turns read from the trajectory manager.")
_SECONDS = metrics.histogram("ranker", "learning_seconds", "Duration of a fit.")
_RECALL = metrics.gauge(
    "ranker", "recall", "Share of the longest fifth of held-out turns ranked into it."
)


class Ranker:
    """Keeps nothing on disk: after a restart it reads the store again, in seconds."""

    def __init__(self, config: RankerConfig, feed: TurnFeed) -> None:
        self._config = config
        self._feed = feed
        self._memory = Memory(config.window_prompts)
        self._num_new = 0
        self._learning: asyncio.Task[None] | None = None
        self.learned: Learned | None = None
        """The latest model; None before the first fit."""

    async def run(self) -> None:
        """Read and fit until cancelled; the previous model is served during a fit."""
        while True:
            await self._read()
            if self._is_due():
                self._learning = asyncio.create_task(self._learn())
            await asyncio.sleep(self._config.poll_seconds)

    async def _read(self) -> None:
        try:
            async for turn in self._feed.ended():
                self._memory.add(turn.start, turn.num_tokens)
                self._num_new += 1
                _TURNS.inc()
        except NotFoundError:
            _log.warning("run_not_found", run_id=self._config.run_id)

    def _is_due(self) -> bool:
        if self._learning is not None:
            if not self._learning.done():
                return False
            self._learning.result()  # raises its failure, which ends the process
        return self._num_new >= self._config.train_every_turns

    async def _learn(self) -> None:
        self._num_new = 0
        began = time.monotonic()
        learned = await asyncio.to_thread(learn, self._memory.examples())
        _SECONDS.observe(time.monotonic() - began)
        _RECALL.set(learned.recall)
        self.learned = learned
