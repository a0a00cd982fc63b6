"""GRPO (DeepSeekMath, arXiv 2402.03300, outcome supervision).

    A = (r - mean(r)) / (std(r) + eps)                                       of the group
    J = 1/R sum_r 1/|r| sum_t min(rho_t * A, clip(rho_t, 1 - low, 1 + high) * A) - beta * k3_t

rho is relative to the recorded behaviour policy. As in all related algorithms here, `importance`
bounds its weight, which PPO leaves unbounded for A < 0; beta is `kl_loss`, 0 unless set.
"""

from __future__ import annotations

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
        importance=TrustRegion.of(config, low=0.2, high=0.2),
        aggregation="sequence_mean",
    )
