"""What a reinforcement-learning algorithm is to the trainer: advantages and a loss.

Shape suffixes: B rows of a micro-batch, T positions that are predicted, R rollouts of the step.
"""
# ruff: noqa: N803, N815 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.chassis import plugins
from trainer.config import TrainerConfig

__all__ = ["ALGORITHMS", "Algorithm", "LossTerms", "PolicyTokens", "make_algorithm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """What a loss is computed from, all shaped [B, T]."""

    logprobs_BT: torch.Tensor
    """Log-prob under the weights in training, after temperature; carries the gradient."""
    behaviour_logprobs_BT: torch.Tensor
    """Log-prob recorded when it was sampled."""
    advantages_BT: torch.Tensor
    """Advantage of its rollout."""
    weight_versions_BT: torch.Tensor
    """Weights it was sampled under."""
    loss_mask_BT: torch.Tensor
    """True where the loss counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Sums over the trainable tokens of a micro-batch.

    The trainer divides by the number of trainable tokens of the whole step: the result depends
    neither on the micro-batching nor on the ranks.
    """

    loss: torch.Tensor
    """Sum of the token losses; backward starts here."""
    sums: Mapping[str, torch.Tensor]
    """Sums to report as means, by metric name."""


class Algorithm(Protocol):
    """A plug-in. Its constructor takes the `TrainerConfig`."""

    def advantages(
        self, rewards_R: NDArray[np.float64], group_ids: Sequence[str]
    ) -> NDArray[np.float64]:
        """Advantage of each rollout from the rewards of its group."""
        ...

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        """Token losses of a micro-batch, summed. Uses no state: micro-batches come in any order."""
        ...


ALGORITHMS = {"grpo": "trainer.algorithms.grpo:build"}


def make_algorithm(config: TrainerConfig) -> Algorithm:
    """The algorithm that `config.algorithm` names: a built-in, or "package.module:Name".

    Raises:
        ConfigError: neither of the two, or a setting it refuses.
    """
    algorithm: Algorithm = plugins.make("algorithm", config.algorithm, ALGORITHMS, config)
    return algorithm
