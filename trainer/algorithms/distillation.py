"""On-policy distillation: the policy samples, and a teacher gives the log-prob of each token.

    A_t = log pi_teacher(t) - log pi_theta(t)
    J = 1/N sum_t rho_t * A_t * log pi_theta(t)                    N tokens of the step

A_t and rho carry no gradient: in expectation this is the gradient of -KL(pi_theta || pi_teacher),
token by token (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543). The teacher's log-probs are the
column `algorithm.reference_column`; rewards are reported but not trained on.
"""
# ruff: noqa: N803, N806 -- arrays carry shape suffixes

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainer.algorithms.base import LossTerms, PolicyTokens, Rollouts, TokenWeights
from trainer.algorithms.terms.importance import Correction
from trainer.algorithms.terms.policy_gradient import PolicyGradient
from trainer.config import TrainerConfig


class Distillation:
    """The algorithm of the module docstring."""

    whole_step = whole_groups = critic = False

    def __init__(self, config: TrainerConfig) -> None:
        """Build the algorithm from `config`.

        Raises:
            ValueError: `algorithm.reference_column` is not set.
        """
        if not config.algorithm.reference_column:
            raise ValueError(
                "algorithm.reference_column is not set: give the column of the teacher's log-probs"
            )
        self._gradient = PolicyGradient.of(
            config,
            baseline=_zero,
            importance=Correction.of(config),
            aggregation="token_mean",
            of_logprobs=True,
        )

    def advantages(self, rollouts: Rollouts) -> NDArray[np.float64]:
        """0: the loss computes the advantages of tokens."""
        return self._gradient.advantages(rollouts)

    def token_weights(self, num_tokens_R: NDArray[np.int64]) -> TokenWeights:
        """Every token of the step counts the same, unless `algorithm.loss_aggregation` is set."""
        return self._gradient.token_weights(num_tokens_R)

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        """The loss of the module docstring, summed over the micro-batch."""
        advantages_BT = tokens.reference_logprobs_BT - tokens.logprobs_BT.detach()
        return self._gradient.loss(replace(tokens, advantages_BT=advantages_BT))


def _zero(rollouts: Rollouts) -> NDArray[np.float64]:
    return np.zeros(len(rollouts.rewards_R))
