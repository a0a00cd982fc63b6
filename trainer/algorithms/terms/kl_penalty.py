"""The KL divergence from a frozen reference policy, estimated from the sampled tokens.

    d = log pi(t) - log pi_ref(t)
    k1 = d          unbiased, high variance
    k2 = d^2 / 2    its gradient is that of KL(pi || pi_ref), its value is biased
    k3 = exp(-d) - 1 + d        unbiased, never negative; used by GRPO (arXiv 2402.03300, eq. 4)

In the loss k itself is differentiated: grad k1 is 0 on average. In the reward only the score is:
there k1 gives the gradient of KL(pi || pi_ref), and k3 that minus the gradient of
KL(pi_ref || pi), so next to nothing where the two policies are close.

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
    """The penalty in the loss: beta * sum_t u_t * k_t, with u_t the weight of the token.

    Tokens sampled by older weights are not corrected, as in GRPO.
    """

    weight: float
    """beta; 0: no penalty."""
    estimator: KLEstimator
    """Estimator k."""
    has_reference: bool
    """Whether samples have reference log-probs."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Self:
        """With the settings of `config`."""
        return cls(
            weight=config.kl.loss,
            estimator=config.kl.estimator,
            has_reference=bool(config.algorithm.reference_column),
        )

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        """The sum over a micro-batch, differentiable in `tokens.logprobs_BT`."""
        if self.weight == 0:
            return tokens.logprobs_BT.new_zeros(())
        difference_BT = _difference(tokens, tokens.logprobs_BT)
        return self.weight * (estimated(difference_BT, self.estimator) * tokens.weights_BT).sum()

    def statistics(self, tokens: PolicyTokens) -> dict[str, torch.Tensor]:
        """k3, the estimator with the least noise, summed over tokens."""
        if not self.has_reference:
            return {}
        difference_BT = _difference(tokens, tokens.logprobs_BT.detach())
        return {"reference_kl": estimated(difference_BT, "k3").sum()}


def _difference(tokens: PolicyTokens, logprobs_BT: torch.Tensor) -> torch.Tensor:
    """d; 0 for tokens that are not trainable, so that k is 0 too."""
    zero = logprobs_BT.new_zeros(())
    return torch.where(tokens.loss_mask_BT, logprobs_BT - tokens.reference_logprobs_BT, zero)
