"""The family of algorithms whose gradient is a weighted sum of the score function.

    -grad L = 1/D sum_t u_t * (w_t * A_t * grad log pi_theta(t) - beta * grad k_t)

A_t is the advantage of the token's rollout, u_t what a token counts and D what that adds up to, w_t
what the token's importance makes of it, by ratios under the weights in training. An algorithm is a
choice of these three; k_t is the distance from a reference, if there is one (`divergence.py`). w
carries no gradient: PPO's clipped surrogate (arXiv 1707.06347) is w = rho where its minimum is not
the clipped term, and 0 where it is.

Shape suffixes: B rows of a micro-batch, T positions that are predicted, R rollouts of the step.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.algorithms.base import LossTerms, PolicyTokens, Rollouts, TokenWeights
from trainer.algorithms.terms.kl_penalty import KLPenalty
from trainer.algorithms.terms.loss_aggregation import make_aggregation
from trainer.config import LossWeights, TrainerConfig

__all__ = ["Importance", "PolicyGradient", "Ratios"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """The probability of each token now, relative to when it was sampled; without gradient."""

    log_ratio_BT: torch.Tensor
    """log rho; 0 where the loss does not count."""
    ratio_BT: torch.Tensor
    """rho = pi_theta / pi_behaviour."""
    advantages_BT: torch.Tensor
    """Of the tokens' rollouts."""
    loss_mask_BT: torch.Tensor
    """True where the loss counts."""

    @classmethod
    def of(cls, tokens: PolicyTokens) -> Self:
        """The ratios of a micro-batch."""
        log_ratio_BT = torch.where(
            tokens.loss_mask_BT,
            tokens.logprobs_BT.detach() - tokens.behaviour_logprobs_BT,
            tokens.logprobs_BT.new_zeros(()),
        )
        return cls(
            log_ratio_BT=log_ratio_BT,
            ratio_BT=log_ratio_BT.exp(),
            advantages_BT=tokens.advantages_BT,
            loss_mask_BT=tokens.loss_mask_BT,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """What ratios were made into; both [B, T] and without gradient."""

    weight_BT: torch.Tensor
    """w."""
    ratio_BT: torch.Tensor
    """What w would be without bounds."""
    value_BT: torch.Tensor
    """What the objective holds in its place: w, or the limit where PPO's surrogate is clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """An algorithm of this family."""

    baseline: Callable[[Rollouts], NDArray[np.float64]]
    """From rewards to A, [R]."""
    importance: Callable[[Ratios], Importance]
    """From ratios to w."""
    aggregation: Callable[[NDArray[np.int64]], TokenWeights]
    """From lengths to u and D."""
    penalty: KLPenalty
    """From tokens to beta * k."""
    staleness_decay: float = 1.0
    """What w is multiplied by for each version that the token is behind."""
    whole_step: bool = False
    """True if the baseline is of more than the rollout's own group."""
    whole_groups: bool = False
    """True if rollouts of a group are compared in the loss; here they never are."""
    critic: bool = False
    """True if the advantage of a token is made from values."""
    of_logprobs: bool = False
    """True if the objective is w * A * log pi_theta and not w * A, which has the same gradient."""

    @classmethod
    def of(
        cls,
        config: TrainerConfig,
        *,
        baseline: Callable[[Rollouts], NDArray[np.float64]],
        importance: Callable[[Ratios], Importance],
        aggregation: LossWeights,
        whole_step: bool = False,
        of_logprobs: bool = False,
    ) -> Self:
        """With all that is configured alike for every algorithm.

        Raises:
            ValueError: weights of tokens need a length that is not set.
        """
        return cls(
            baseline=baseline,
            importance=importance,
            aggregation=make_aggregation(config, aggregation),
            penalty=KLPenalty.of(config),
            staleness_decay=config.staleness_decay,
            whole_step=whole_step,
            of_logprobs=of_logprobs,
        )

    def advantages(self, rollouts: Rollouts) -> NDArray[np.float64]:
        """A, [R]."""
        return self.baseline(rollouts)

    def token_weights(self, num_tokens_R: NDArray[np.int64]) -> TokenWeights:
        """u and D."""
        return self.aggregation(num_tokens_R)

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        """L * D of the micro-batch, with statistics of its ratios."""
        ratios, mask_BT = Ratios.of(tokens), tokens.loss_mask_BT
        zero = tokens.logprobs_BT.new_zeros(())
        importance = self.importance(ratios)
        value_BT = importance.value_BT
        if self.of_logprobs:
            value_BT = value_BT * tokens.logprobs_BT.detach()
        # 0 in value, the score function in gradient.
        score_BT = tokens.logprobs_BT - tokens.logprobs_BT.detach()
        surrogate_BT = tokens.advantages_BT * (value_BT + importance.weight_BT * score_BT)
        counts_BT = tokens.weights_BT * self._decay(tokens, zero)
        gain_BT = torch.where(mask_BT, counts_BT * surrogate_BT, zero)
        loss = self.penalty(tokens) - gain_BT.sum()
        sums = _statistics(ratios, importance, tokens) | self.penalty.statistics(tokens)
        return LossTerms(loss=loss, sums=sums)

    def _decay(self, tokens: PolicyTokens, like: torch.Tensor) -> torch.Tensor:
        return torch.pow(self.staleness_decay, tokens.staleness_BT.to(like.dtype))


def _statistics(
    ratios: Ratios, importance: Importance, tokens: PolicyTokens
) -> dict[str, torch.Tensor]:
    mask_BT, weight_BT = ratios.loss_mask_BT, importance.weight_BT
    lowered_BT = (weight_BT > 0) & (weight_BT < importance.ratio_BT)
    return {
        # Tokens without any push, and those with less than their ratio would give.
        "clip_fraction": (mask_BT & (weight_BT == 0)).sum(),
        "cap_fraction": (mask_BT & lowered_BT).sum(),
        "ratio_mean": (ratios.ratio_BT * mask_BT).sum(),
        "log_ratio_squared_mean": ratios.log_ratio_BT.square().sum(),
        "train_rollout_logprob_abs_diff": ratios.log_ratio_BT.abs().sum(),
        "staleness_mean": (tokens.staleness_BT * mask_BT).sum(),
    }
