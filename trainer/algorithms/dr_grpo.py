"""Dr. GRPO (arXiv 2503.20783): GRPO without its two biases.

    A = r - mean(r)                                                          of the group
    J = 1/R sum_r 1/L sum_t min(rho_t * A, clip(rho_t, 1 - low, 1 + high) * A)

Without the standard deviation, which favours tasks that are nearly solved or nearly unsolved, and
with a constant L (`algorithm.loss_length`) instead of each rollout's length, which favours long
failures.
"""

from __future__ import annotations

from trainer.algorithms.terms.baselines import centred
from trainer.algorithms.terms.importance import TrustRegion
from trainer.algorithms.terms.policy_gradient import PolicyGradient
from trainer.config import TrainerConfig


def build(config: TrainerConfig) -> PolicyGradient:
    """Build the algorithm from `config`.

    Raises:
        ValueError: `algorithm.loss_length` is not set.
    """
    return PolicyGradient.of(
        config,
        baseline=centred,
        importance=TrustRegion.of(config, low=0.2, high=0.2),
        aggregation="constant",
    )
