"""Reads the ended turns of a run and refits the length model after a number of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from seamflow.errors import NotFoundError

from services.chassis import metrics
from services.chassis.errors import Reason, exhausted
from services.chassis.log import get_logger
from services.ranker.config import RankerConfig
from services.ranker.features import TurnStart
from services.ranker.learner import Learned, Memory, learn
from services.ranker.regression import HASHED, Regression
from services.ranker.turn_feed import TurnFeed

_POLL_SECONDS = 1.0
"""Time between two reads of newly ended turns."""

_log = get_logger()
_MAX_WAITING = 4096
_RETRY_SECONDS = 1.0
_TURNS = metrics.counter("ranker", "turns_total", "Ended turns read from the trajectory manager.")
_SECONDS = metrics.histogram("ranker", "learning_seconds", "Duration of a fit.")
_RECALL = metrics.gauge(
    "ranker", "recall", "Share of the longest fifth of held-out turns ranked into it."
)


class Ranker:
    """Keeps nothing on disk: after a restart it reads the store again, in seconds."""

    def __init__(
        self, config: RankerConfig, feed: TurnFeed, regression: Regression = HASHED
    ) -> None:
        self._config = config
        self._feed = feed
        self._regression = regression
        self._memory = Memory(config.window_prompts, regression)
        self._predictor = ThreadPoolExecutor(1, "predictor")
        self._num_waiting = 0
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
            await asyncio.sleep(_POLL_SECONDS)

    async def expected_tokens(self, learned: Learned, starts: Sequence[TurnStart]) -> list[float]:
        """Predict in a thread, one call after another.

        A caller that gives up does not end the work: what it computes of a prompt is kept, so that
        the next call is quick.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED, too many prompts wait.
        """
        if self._num_waiting + len(starts) > _MAX_WAITING:
            raise exhausted(
                Reason.TOO_MANY_REQUESTS,
                f"{self._num_waiting} prompts wait for the ranker, which takes {_MAX_WAITING} at "
                "most: ask later, or give it a smaller model or a GPU",
                _RETRY_SECONDS,
            )
        self._num_waiting += len(starts)
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._predictor, learned.expected_tokens, starts)
        work.add_done_callback(lambda _: self._predicted(len(starts)))
        return await asyncio.shield(work)

    def _predicted(self, number: int) -> None:
        self._num_waiting -= number

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
        learned = await asyncio.to_thread(learn, self._memory.examples(), self._regression)
        _SECONDS.observe(time.monotonic() - began)
        _RECALL.set(learned.recall)
        self.learned = learned
