"""Follows a run: reads the turns that end, and learns anew every so many of them."""

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
_SECONDS = metrics.histogram("ranker", "learning_seconds", "Time that it took to learn anew.")
_RECALL = metrics.gauge(
    "ranker", "recall", "Share of the longest fifth of held-out turns ranked into it."
)


class Ranker:
    """Nothing is kept on disk: after a restart all is learned again from the store, in seconds."""

    def __init__(self, config: RankerConfig, feed: TurnFeed) -> None:
        self._config = config
        self._feed = feed
        self._memory = Memory(config.window_prompts)
        self._num_new = 0
        self._learning: asyncio.Task[None] | None = None
        self.learned: Learned | None = None
        """What it knows; None: nothing yet."""

    async def run(self) -> None:
        """Read and learn until cancelled; what was learned last is served meanwhile."""
        while True:
            await self._read()
            if self._is_due():
                self._learning = asyncio.create_task(self._learn())
            await asyncio.sleep(self._config.poll_seconds)

    async def _read(self) -> None:
        try:
            async for turn in self._feed.ended():
                self._memory.add(turn.beginning, turn.num_tokens)
                self._num_new += 1
                _TURNS.inc()
        except NotFoundError:
            _log.warning("run does not exist yet", run_id=self._config.run_id)

    def _is_due(self) -> bool:
        if self._learning is not None:
            if not self._learning.done():
                return False
            self._learning.result()  # what fails there ends the process, as anywhere
        return self._num_new >= self._config.train_every_turns

    async def _learn(self) -> None:
        self._num_new = 0
        began = time.monotonic()
        learned = await asyncio.to_thread(learn, self._memory.examples())
        _SECONDS.observe(time.monotonic() - began)
        _RECALL.set(learned.recall)
        self.learned = learned
