"""Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298): separate trust region and importance.

    J = 1/N sum_t pi_prox / pi_behaviour * min(r_t * A, clip(r_t, 1 - low, 1 + high) * A)
    r_t = pi_theta / pi_prox

pi_prox is the policy before the step. A step of one update is at pi_theta = pi_prox, where r_t = 1
and nothing is clipped: the corrected policy gradient remains. The clip range acts from the second
update of a step on (`num_epochs`, `num_mini_batches`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trainer.algorithms.terms.baselines import standardised
from trainer.algorithms.terms.importance import TrustRegion
from trainer.algorithms.terms.policy_gradient import PolicyGradient
from trainer.config import TrainerConfig


def build(config: TrainerConfig) -> PolicyGradient:
    """Build the algorithm from `config`."""
    return PolicyGradient.of(
        config,
        baseline=partial(standardised, epsilon=config.algorithm.advantage_epsilon),
        importance=replace(TrustRegion.of(config, low=0.2, high=0.2), decoupled=True),
        aggregation="token_mean",
    )
