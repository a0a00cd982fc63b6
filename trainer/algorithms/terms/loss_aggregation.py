"""What a token counts in the loss of a step.

Shape suffix: R rollouts.
"""
# ruff: noqa: N803 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trainer.algorithms.base import Weights
from trainer.config import LossWeights, TrainerConfig

__all__ = ["constant", "sequence_mean", "sequence_sum", "token_mean", "token_weights"]

_Lengths = NDArray[np.int64]


def token_mean(num_tokens_R: _Lengths) -> Weights:
    """Every token of the step counts the same (DAPO, arXiv 2503.14476)."""
    return Weights(tokens_R=_ones(num_tokens_R), counts_R=num_tokens_R.astype(np.float64))


def sequence_mean(num_tokens_R: _Lengths) -> Weights:
    """Every rollout counts the same, and within it every token (GRPO, arXiv 2402.03300)."""
    return Weights(tokens_R=1.0 / num_tokens_R, counts_R=_ones(num_tokens_R))


def sequence_sum(num_tokens_R: _Lengths) -> Weights:
    """A rollout is one action: log-probs of its tokens add up (RLOO, arXiv 2402.14740)."""
    return Weights(tokens_R=_ones(num_tokens_R), counts_R=_ones(num_tokens_R))


def constant(num_tokens_R: _Lengths, length: int) -> Weights:
    """As `sequence_mean` if every rollout had `length` tokens (Dr. GRPO, arXiv 2503.20783)."""
    return Weights(tokens_R=_ones(num_tokens_R) / length, counts_R=_ones(num_tokens_R))


def token_weights(config: TrainerConfig, usual: LossWeights) -> Callable[[_Lengths], Weights]:
    """As configured; `usual` is the algorithm's own way.

    Raises:
        ValueError: a constant length is needed and not set.
    """
    way = usual if config.loss_weights == "algorithm" else config.loss_weights
    if way == "constant" and not config.loss_length:
        raise ValueError(
            "loss_length is 0, and the loss is divided by it: give the most tokens that a rollout "
            "may sample"
        )
    ways: dict[LossWeights, Callable[[_Lengths], Weights]] = {
        "token_mean": token_mean,
        "sequence_mean": sequence_mean,
        "sequence_sum": sequence_sum,
        "constant": partial(constant, length=config.loss_length),
    }
    return ways[way]


def _ones(num_tokens_R: _Lengths) -> NDArray[np.float64]:
    return np.ones(len(num_tokens_R))
