"""The family of algorithms whose gradient is a weighted sum of the score function.

    -grad L = 1/D sum_t u_t * (w_t * A_t * grad log pi_theta(t) - beta * grad k_t)

A_t is the advantage of the token's rollout, u_t the weight of the token and D the denominator
(`loss_aggregation.py`), w_t the importance weight under the weights in training (`importance.py`).
An algorithm is a choice of these three; k_t is the KL penalty, if there is a reference
(`kl_penalty.py`). w carries no gradient: PPO's clipped surrogate (arXiv 1707.06347) is w = rho
where its minimum is not the clipped term, and 0 where it is.

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
from trainer.config import LossAggregation, TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """The probability of each token now, relative to when it was sampled; without gradient."""

    proximal_log_ratio_BT: torch.Tensor | None
    """log pi_theta / pi_prox, relative to the start of the step; None: a step of one update, 0."""
    log_ratio_BT: torch.Tensor
    """log rho; 0 for tokens that are not trainable."""
    ratio_BT: torch.Tensor
    """rho = pi_theta / pi_behaviour."""
    advantages_BT: torch.Tensor
    """Advantages of the tokens' rollouts."""
    loss_mask_BT: torch.Tensor
    """True for trainable tokens."""

    @classmethod
    def of(cls, tokens: PolicyTokens) -> Self:
        """The ratios of a micro-batch."""
        now_BT, before_BT = tokens.logprobs_BT.detach(), tokens.proximal_logprobs_BT
        zero = tokens.logprobs_BT.new_zeros(())
        log_ratio_BT = torch.where(tokens.loss_mask_BT, now_BT - tokens.behaviour_logprobs_BT, zero)
        since_BT = (
            None
            if before_BT is None
            else torch.where(tokens.loss_mask_BT, now_BT - before_BT, zero)
        )
        return cls(
            proximal_log_ratio_BT=since_BT,
            log_ratio_BT=log_ratio_BT,
            ratio_BT=log_ratio_BT.exp(),
            advantages_BT=tokens.advantages_BT,
            loss_mask_BT=tokens.loss_mask_BT,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Importance weights; all [B, T] and without gradient."""

    weight_BT: torch.Tensor
    """w."""
    ratio_BT: torch.Tensor
    """w without bounds."""
    value_BT: torch.Tensor
    """The factor in the objective's value: w, or the limit where PPO's surrogate is clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """A policy-gradient algorithm."""

    baseline: Callable[[Rollouts], NDArray[np.float64]]
    """From rewards to A, [R]."""
    importance: Callable[[Ratios], Importance]
    """From ratios to w."""
    aggregation: Callable[[NDArray[np.int64]], TokenWeights]
    """From lengths to u and D."""
    penalty: KLPenalty
    """From tokens to beta * k."""
    staleness_decay: float = 1.0
    """Factor of w for each version of staleness."""
    whole_step: bool = False
    """True if the baseline compares rollouts of different groups."""
    whole_groups: bool = False
    """True if the loss compares rollouts of a group; never for this family."""
    critic: bool = False
    """True if advantages depend on values."""
    several_updates: bool = False
    """True if the importance regards the policy at the start of the step."""
    of_logprobs: bool = False
    """True if the objective is w * A * log pi_theta and not w * A, which has the same gradient."""

    @classmethod
    def of(
        cls,
        config: TrainerConfig,
        *,
        baseline: Callable[[Rollouts], NDArray[np.float64]],
        importance: Callable[[Ratios], Importance],
        aggregation: LossAggregation,
        whole_step: bool = False,
        of_logprobs: bool = False,
    ) -> Self:
        """Build from the settings that all algorithms share; `aggregation` is the default one.

        Raises:
            ValueError: the loss aggregation needs `algorithm.loss_length`, and it is not set.
        """
        return cls(
            baseline=baseline,
            importance=importance,
            aggregation=make_aggregation(config, aggregation),
            penalty=KLPenalty.of(config),
            staleness_decay=config.algorithm.staleness_decay,
            whole_step=whole_step,
            several_updates=getattr(importance, "several_updates", False),
            of_logprobs=of_logprobs,
        )

    def advantages(self, rollouts: Rollouts) -> NDArray[np.float64]:
        """A, [R]."""
        return self.baseline(rollouts)

    def token_weights(self, num_tokens_R: NDArray[np.int64]) -> TokenWeights:
        """u and D."""
        return self.aggregation(num_tokens_R)

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        """L * D over the micro-batch, with statistics of its ratios."""
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
        return LossTerms(loss=loss, sums=sums, advantages_BT=tokens.advantages_BT)

    def _decay(self, tokens: PolicyTokens, like: torch.Tensor) -> torch.Tensor:
        return torch.pow(self.staleness_decay, tokens.staleness_BT.to(like.dtype))


def _statistics(
    ratios: Ratios, importance: Importance, tokens: PolicyTokens
) -> dict[str, torch.Tensor]:
    mask_BT, weight_BT = ratios.loss_mask_BT, importance.weight_BT
    lowered_BT = (weight_BT > 0) & (weight_BT < importance.ratio_BT)
    return {
        # Tokens without gradient, and tokens with a bounded ratio.
        "clip_fraction": (mask_BT & (weight_BT == 0)).sum(),
        "cap_fraction": (mask_BT & lowered_BT).sum(),
        "ratio_mean": (ratios.ratio_BT * mask_BT).sum(),
        "log_ratio_squared_mean": ratios.log_ratio_BT.square().sum(),
        "train_rollout_logprob_abs_diff": ratios.log_ratio_BT.abs().sum(),
        "staleness_mean": (tokens.staleness_BT * mask_BT).sum(),
    }
