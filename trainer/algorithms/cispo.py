"""CISPO (MiniMax-M1, arXiv 2506.13585): the importance weight is clipped, no token is dropped.

    J = 1/N sum_t sg[min(rho_t, 1 + high)] * A * log pi_theta(t)

There is no lower limit, as in the paper's experiments, so `clip_low` has no effect; the clip is the
bound on importance, so `importance` must keep its default.
"""

from __future__ import annotations

from functools import partial

from trainer.algorithms.terms.baselines import standardised
from trainer.algorithms.terms.importance import Correction
from trainer.algorithms.terms.policy_gradient import PolicyGradient
from trainer.config import TrainerConfig


def build(config: TrainerConfig) -> PolicyGradient:
    """Build the algorithm from `config`.

    Raises:
        ValueError: `importance` is not "truncate".
    """
    if config.algorithm.importance != "truncate":
        raise ValueError(
            f"algorithm.importance is {config.algorithm.importance!r}: cispo truncates ratios at "
            "1 + clip_high, leave it at 'truncate'"
        )
    high = 0.28 if config.algorithm.clip_high is None else config.algorithm.clip_high
    return PolicyGradient.of(
        config,
        baseline=partial(standardised, epsilon=config.algorithm.advantage_epsilon),
        importance=Correction(way="truncate", floor=0.0, cap=1 + high),
        aggregation="token_mean",
        of_logprobs=True,
    )
