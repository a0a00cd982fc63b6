"""DAPO (arXiv 2503.14476): GRPO's advantages, clip-higher, and a loss in which tokens count alike.

    J = 1/N sum_t min(rho_t * A, clip(rho_t, 1 - low, 1 + high) * A)         N tokens of the step

Its two other parts belong to any algorithm here: groups without variance are dropped and replaced
where the run says so (`zero_variance_reward`), and `overlong_tokens` shapes the reward of rollouts
that are nearly too long.

As a step takes one gradient per batch, the proximal policy of decoupled PPO is the weights at its
beginning: see `decoupled_ppo.py`.
"""

from __future__ import annotations

from functools import partial

from trainer.algorithms.terms.baselines import standardised
from trainer.algorithms.terms.importance import TrustRegion
from trainer.algorithms.terms.policy_gradient import PolicyGradient
from trainer.config import TrainerConfig

__all__ = ["build"]


def build(config: TrainerConfig) -> PolicyGradient:
    """As configured."""
    return PolicyGradient.of(
        config,
        baseline=partial(standardised, epsilon=config.advantage_epsilon),
        importance=TrustRegion.of(config, low=0.2, high=0.28),
        aggregation="token_mean",
    )
