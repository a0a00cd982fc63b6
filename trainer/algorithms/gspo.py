"""GSPO (arXiv 2507.18071): importance ratios of sequences, not of tokens.

    s = exp(1/|y| sum_t log rho_t)
    J = 1/R sum_r min(s * A, clip(s, 1 - low, 1 + high) * A)

s varies far less than rho, so its clip range is far smaller. Its gradient is s / |y| times the
score of each token, so tokens are weighted as in `sequence_mean`. A rollout with a rewritten
history has several sequences, each with a separate s.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from trainer.algorithms.terms.baselines import standardised
from trainer.algorithms.terms.importance import TrustRegion
from trainer.algorithms.terms.policy_gradient import Importance, PolicyGradient, Ratios
from trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _SequenceImportance:
    region: TrustRegion

    def __call__(self, ratios: Ratios) -> Importance:
        """The same for every token of a row."""
        num_tokens_B = ratios.loss_mask_BT.sum(-1, keepdim=True).clamp(min=1)
        mean_B = ratios.log_ratio_BT.sum(-1, keepdim=True) / num_tokens_B
        ratio_BT = mean_B.exp().expand_as(ratios.ratio_BT)
        return self.region.bounded(ratio_BT, ratios.advantages_BT)


def build(config: TrainerConfig) -> PolicyGradient:
    """Build the algorithm from `config`."""
    return PolicyGradient.of(
        config,
        baseline=partial(standardised, epsilon=config.algorithm.advantage_epsilon),
        importance=_SequenceImportance(region=TrustRegion.of(config, low=3e-4, high=4e-4)),
        aggregation="sequence_mean",
    )
