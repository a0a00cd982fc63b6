"""GRPO whose loss takes a time for each row, as on a device that is slower than this machine's.

It sleeps, so that half of the rows on each of two ranks take half of the time, whatever else this
machine computes.
"""

from __future__ import annotations

import os
import time
from typing import Any

from trainer.algorithms.base import LossTerms, PolicyTokens
from trainer.algorithms.critic_free import grpo
from trainer.config import TrainerConfig

ROW_SECONDS = "SEAMFLOW_TEST_ROW_SECONDS"
"""Environment variable: seconds of a row."""


class SlowGrpo:
    """A step of 16 rows takes 16 times as long as a row on one rank, and 8 times on two."""

    def __init__(self, config: TrainerConfig) -> None:
        """As GRPO, of which everything but the time is."""
        self._grpo = grpo(config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grpo, name)

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        """See `Algorithm.loss`."""
        time.sleep(float(os.environ[ROW_SECONDS]) * len(tokens.rollouts_B))
        return self._grpo.loss(tokens)
