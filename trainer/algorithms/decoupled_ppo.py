"""Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298): separate trust region and importance.

    J = 1/N sum_t pi_prox / pi_behaviour * min(r_t * A, clip(r_t, 1 - low, 1 + high) * A)
    r_t = pi_theta / pi_prox

pi_prox is the policy before the step. A step takes one gradient per batch, at pi_theta = pi_prox,
where r_t = 1 and nothing is clipped: the corrected policy gradient remains, and the clip range has
no effect.
"""

from __future__ import annotations

from functools import partial

from trainer.algorithms.terms.baselines import standardised
from trainer.algorithms.terms.importance import Correction
from trainer.algorithms.terms.policy_gradient import PolicyGradient
from trainer.config import TrainerConfig

__all__ = ["build"]


def build(config: TrainerConfig) -> PolicyGradient:
    """Build the algorithm from `config`."""
    return PolicyGradient.of(
        config,
        baseline=partial(standardised, epsilon=config.algorithm.advantage_epsilon),
        importance=Correction.of(config),
        aggregation="token_mean",
    )
