"""RLOO, REINFORCE leave-one-out (arXiv 2402.14740): a rollout is one action.

    A = r - mean of the group's other rewards
    J = 1/R sum_r A * log pi_theta(r)

The paper is on-policy; here tokens sampled by older weights get importance weights. The KL term of
the paper's reward is `kl_reward`, 0 unless set.
"""

from __future__ import annotations

from trainer.algorithms.terms.baselines import leave_one_out
from trainer.algorithms.terms.importance import Correction
from trainer.algorithms.terms.policy_gradient import PolicyGradient
from trainer.config import TrainerConfig


def build(config: TrainerConfig) -> PolicyGradient:
    """Build the algorithm from `config`."""
    return PolicyGradient.of(
        config,
        baseline=leave_one_out,
        importance=Correction.of(config),
        aggregation="sequence_sum",
        of_logprobs=True,
    )
