"""The distance from a frozen reference policy, estimated from the tokens that were sampled.

    d = log pi(t) - log pi_ref(t)
    k1 = d          unbiased, varies much
    k2 = d^2 / 2    its gradient is that of KL(pi || pi_ref), its value is biased
    k3 = exp(-d) - 1 + d        unbiased, never negative; GRPO (arXiv 2402.03300, eq. 4) has it

In the loss k itself is differentiated: grad k1 is 0 on average. In the reward only the score is:
there k1 gives the gradient of KL(pi || pi_ref), and k3 that less the gradient of KL(pi_ref || pi),
which is nearly the same where the two are near.

J. Schulman, "Approximating KL divergence", 2020. Shape suffixes: B rows of a micro-batch, T
positions that are predicted.
"""
# ruff: noqa: N803, N806 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from trainer.algorithms.base import PolicyTokens
from trainer.config import KLEstimator, TrainerConfig

__all__ = ["KLPenalty", "estimated"]


def estimated(difference: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """k of each token, of any shape."""
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(-difference) + difference


@dataclass(frozen=True, slots=True, kw_only=True)
class KLPenalty:
    """What is added to the loss: beta * sum_t u_t * k_t, u_t being what the token counts.

    A token that older weights sampled counts as one of today's, as in GRPO.
    """

    weight: float
    """beta; 0: nothing is added."""
    estimator: KLEstimator
    """Which k."""
    has_reference: bool
    """Whether there is a reference at all."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Self:
        """As configured."""
        return cls(
            weight=config.kl_loss,
            estimator=config.kl_estimator,
            has_reference=bool(config.reference_column),
        )

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        """Of a micro-batch, a sum; its gradient is that of `tokens.logprobs_BT`."""
        if self.weight == 0:
            return tokens.logprobs_BT.new_zeros(())
        difference_BT = _difference(tokens, tokens.logprobs_BT)
        return self.weight * (estimated(difference_BT, self.estimator) * tokens.weights_BT).sum()

    def statistics(self, tokens: PolicyTokens) -> dict[str, torch.Tensor]:
        """k3, which is least noisy, summed over tokens."""
        if not self.has_reference:
            return {}
        difference_BT = _difference(tokens, tokens.logprobs_BT.detach())
        return {"reference_kl": estimated(difference_BT, "k3").sum()}


def _difference(tokens: PolicyTokens, logprobs_BT: torch.Tensor) -> torch.Tensor:
    """d; 0 where the loss does not count, where k is 0 too."""
    zero = logprobs_BT.new_zeros(())
    return torch.where(tokens.loss_mask_BT, logprobs_BT - tokens.reference_logprobs_BT, zero)
