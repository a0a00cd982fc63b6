"""Predictions beside the event loop: none is lost with its caller, and they are bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from services.chassis.errors import ServiceError
from services.ranker.config import RankerConfig
from services.ranker.features import TurnStart
from services.ranker.learner import Learned, Memory, learn
from services.ranker.ranker import Ranker
from services.ranker.regression import HASHED
from services.ranker.turn_feed import TurnFeed

START = TurnStart(task_id="task", token_ids=[1, 2], turn_index=0)


class SlowModel:
    """Predicts once it is allowed to."""

    def __init__(self) -> None:
        self.allowed = threading.Event()
        self.calls: list[int] = []

    def predict(self, prompts: Sequence[Any]) -> Any:
        """Ten tokens each."""
        assert self.allowed.wait(30)
        self.calls.append(len(prompts))
        return np.full(len(prompts), np.log(10.0))


def slow() -> tuple[Ranker, Learned, SlowModel]:
    """A ranker, and what it has learned with a slow model."""
    memory = Memory(10)
    memory.add(TurnStart(task_id="other", token_ids=[1], turn_index=0), 5)
    model = SlowModel()
    fitted = learn(memory.examples())
    learned = Learned(
        regression=HASHED,
        model=model,
        earlier={},
        num_turns=1,
        recall=0.0,
        median_tokens=fitted.median_tokens,
        p90_tokens=fitted.p90_tokens,
    )
    return Ranker(RankerConfig(run_id="run"), cast("TurnFeed", None)), learned, model


async def test_a_prediction_goes_on_when_its_caller_has_given_up() -> None:
    """What it computes is kept for the next call, so its work is no waste."""
    ranker, learned, model = slow()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await ranker.expected_tokens(learned, [START])
    model.allowed.set()
    assert await ranker.expected_tokens(learned, [START, START]) == pytest.approx([10, 10])
    assert model.calls == [1, 2]


async def test_prompts_that_wait_are_bounded() -> None:
    """A call beyond the bound is refused at once; after the others it is taken."""
    ranker, learned, model = slow()
    waiting = [
        asyncio.create_task(ranker.expected_tokens(learned, [START] * 1024)) for _ in range(4)
    ]
    await asyncio.sleep(0)
    with pytest.raises(ServiceError, match="4096 prompts wait for the ranker"):
        await ranker.expected_tokens(learned, [START])
    model.allowed.set()
    await asyncio.gather(*waiting)
    assert len(await ranker.expected_tokens(learned, [START])) == 1
