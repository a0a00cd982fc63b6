"""Algorithms that end the trainer on one group's samples, as a fault in a user's plug-in does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.algorithms.base import Rollouts
from trainer.algorithms.critic_free import grpo
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.config import TrainerConfig

BAD_GROUP = "t1"


def _build(config: TrainerConfig, advantage: Callable[[], float]) -> PolicyGradient:
    """GRPO, but for the bad group's advantage."""
    algorithm = grpo(config)
    usual = algorithm.advantages

    def advantages(rollouts: Rollouts) -> NDArray[np.float64]:
        found = usual(rollouts)
        bad: Any = np.array([group == BAD_GROUP for group in rollouts.group_ids])
        return np.where(bad, advantage(), found) if bad.any() else found

    algorithm.advantages = advantages  # type: ignore[method-assign]
    return algorithm


def killing(config: TrainerConfig) -> PolicyGradient:
    """The process is killed, as by the kernel when memory is short."""

    def killed() -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    return _build(config, killed)


def raising(config: TrainerConfig) -> PolicyGradient:
    """It raises."""

    def raised() -> float:
        raise KeyError("no such thing")

    return _build(config, raised)


def overflowing(config: TrainerConfig) -> PolicyGradient:
    """The loss is not finite."""
    return _build(config, lambda: float("inf"))
