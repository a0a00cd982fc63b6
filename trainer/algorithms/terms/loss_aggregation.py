"""Loss aggregation: how the losses of tokens are averaged over a step.

Shape suffix: R rollouts.
"""
# ruff: noqa: N803 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trainer.algorithms.base import TokenWeights
from trainer.config import LossAggregation, TrainerConfig

_Lengths = NDArray[np.int64]


def token_mean(num_tokens_R: _Lengths) -> TokenWeights:
    """Every token of the step counts the same (DAPO, arXiv 2503.14476)."""
    return TokenWeights(
        weights_R=_ones(num_tokens_R), denominators_R=num_tokens_R.astype(np.float64)
    )


def sequence_mean(num_tokens_R: _Lengths) -> TokenWeights:
    """Every rollout counts the same, and within it every token (GRPO, arXiv 2402.03300)."""
    return TokenWeights(weights_R=1.0 / num_tokens_R, denominators_R=_ones(num_tokens_R))


def sequence_sum(num_tokens_R: _Lengths) -> TokenWeights:
    """A rollout is one action: sum the log-probs of its tokens (RLOO, arXiv 2402.14740)."""
    return TokenWeights(weights_R=_ones(num_tokens_R), denominators_R=_ones(num_tokens_R))


def constant(num_tokens_R: _Lengths, length: int) -> TokenWeights:
    """`sequence_mean` as if every rollout had `length` tokens (Dr. GRPO, arXiv 2503.20783)."""
    return TokenWeights(weights_R=_ones(num_tokens_R) / length, denominators_R=_ones(num_tokens_R))


def make_aggregation(
    config: TrainerConfig, default: LossAggregation
) -> Callable[[_Lengths], TokenWeights]:
    """The aggregation of `config`, or `default` of the algorithm.

    Raises:
        ValueError: a constant length is needed and not set.
    """
    name = (
        default
        if config.algorithm.loss_aggregation == "algorithm"
        else config.algorithm.loss_aggregation
    )
    if name == "constant" and not config.algorithm.loss_length:
        raise ValueError(
            "algorithm.loss_length is 0, and the loss is divided by it: give the maximum number of "
            "tokens a rollout may sample"
        )
    aggregations: dict[LossAggregation, Callable[[_Lengths], TokenWeights]] = {
        "token_mean": token_mean,
        "sequence_mean": sequence_mean,
        "sequence_sum": sequence_sum,
        "constant": partial(constant, length=config.algorithm.loss_length),
    }
    return aggregations[name]


def _ones(num_tokens_R: _Lengths) -> NDArray[np.float64]:
    return np.ones(len(num_tokens_R))
