"""REINFORCE++ (arXiv 2501.03262): PPO's clipped surrogate, rewards whitened over the whole step.

    A = (r - mean(r)) / (std(r) + eps)                                       of all N tokens
    J = 1/N sum_t min(rho_t * A, clip(rho_t, 1 - low, 1 + high) * A)

The variant with a baseline, for several rollouts of a task, subtracts the mean of the group first.
The paper has a KL term in the reward of each token, which affects all tokens before it;
`kl_reward` is a term of the whole rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trainer.algorithms.base import Rollouts
from trainer.algorithms.terms.baselines import whitened, whitened_centred
from trainer.algorithms.terms.importance import TrustRegion
from trainer.algorithms.terms.policy_gradient import PolicyGradient
from trainer.config import TrainerConfig


def build(config: TrainerConfig) -> PolicyGradient:
    """Build the algorithm from `config`."""
    return _built(config, partial(whitened, epsilon=config.algorithm.advantage_epsilon))


def build_with_baseline(config: TrainerConfig) -> PolicyGradient:
    """Build the variant with the mean of the group as a baseline."""
    return _built(config, partial(whitened_centred, epsilon=config.algorithm.advantage_epsilon))


def _built(
    config: TrainerConfig, baseline: Callable[[Rollouts], NDArray[np.float64]]
) -> PolicyGradient:
    return PolicyGradient.of(
        config,
        baseline=baseline,
        importance=TrustRegion.of(config, low=0.2, high=0.2),
        aggregation="token_mean",
        whole_step=True,
    )
