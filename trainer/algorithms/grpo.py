"""GRPO (DeepSeekMath, arXiv 2402.03300, outcome supervision), clip-higher where it is configured.

    A = (r - mean(r)) / (std(r) + eps)                                       of the group
    J = 1/R sum_r 1/|r| sum_t min(rho_t * A, clip(rho_t, 1 - low, 1 + high) * A)

rho is relative to the recorded behaviour, and its weight is truncated at `importance_cap`: PPO
leaves it unbounded for A < 0.
"""

from __future__ import annotations

from functools import partial

from trainer.algorithms.baselines import standardised
from trainer.algorithms.importance import TrustRegion
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.weights import token_weights
from trainer.config import TrainerConfig

__all__ = ["build"]


def build(config: TrainerConfig) -> PolicyGradient:
    """As configured."""
    return PolicyGradient(
        baseline=partial(standardised, epsilon=config.advantage_epsilon),
        importance=TrustRegion.of(config),
        token_weights=token_weights(config, "sequence_mean"),
        staleness_decay=config.staleness_decay,
    )
