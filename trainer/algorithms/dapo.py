"""DAPO (arXiv 2503.14476): GRPO's advantages, clip-higher, and a token-mean loss.

    J = 1/N sum_t min(rho_t * A, clip(rho_t, 1 - low, 1 + high) * A)         N tokens of the step

Its two other parts are settings for any algorithm: `zero_variance_reward` of the run drops and
replaces groups without variance, and `overlong_tokens` shapes the reward of long rollouts.
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
        importance=TrustRegion.of(config, low=0.2, high=0.28),
        aggregation="token_mean",
    )
