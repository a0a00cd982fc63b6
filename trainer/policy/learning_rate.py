"""The learning rate of each optimizer step."""

from __future__ import annotations

import math

from trainer.config import TrainerConfig


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Learning rate of optimizer step `step` (from 1): warm-up, then the schedule.

    It is that of transformers' schedules, which count from 0 and begin with a rate of 0: of
    `get_linear_schedule_with_warmup(warmup_steps, num_steps + 1)` at `step`, and without a warm-up
    of `(0, num_steps)` at `step - 1`.
    """
    optimizer = config.optimizer
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * step / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.learning_rate
    first = max(optimizer.warmup_steps, 1)  # the step of the full rate
    remaining = max(config.num_steps - step + 1, 0) / max(config.num_steps - first + 1, 1)
    share = remaining if optimizer.schedule == "linear" else _half_cosine(remaining)
    return optimizer.learning_rate * (optimizer.final_share + (1 - optimizer.final_share) * share)


def _half_cosine(remaining: float) -> float:
    """From 1, with all remaining, to 0 (SGDR, arXiv 1608.03983, eq. 5)."""
    return (1 - math.cos(math.pi * remaining)) / 2
