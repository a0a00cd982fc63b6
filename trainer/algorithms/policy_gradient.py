"""Algorithms whose gradient is a weighted sum of the score function, and the terms they choose.

    -grad L = 1/D sum_t u_t * (w_t * A_t * grad log pi_theta(t) - beta * grad k_t)

A_t is the advantage of the token's rollout (`centred` and the functions after it), w_t the
importance weight under the weights in training (`Importance`), u_t the weight of the token and D
the denominator (`aggregated`). An algorithm is a choice of these three; k_t is the KL penalty, if
there is a reference (`kl_penalty`). w carries no gradient: PPO's clipped surrogate (arXiv
1707.06347) is w = rho where its minimum is not the clipped term, and 0 where it is.

Shape suffixes: B rows of a micro-batch, T positions that are predicted, R rollouts of the step, G
groups of the step.
"""
# ruff: noqa: N802, N803, N806, N815 -- tensors and arrays carry shape suffixes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.algorithms.base import LossTerms, PolicyTokens, Rollouts, TokenWeights
from trainer.config import ImportanceMode, KLEstimator, LossAggregation, TrainerConfig

_Float = NDArray[np.float64]


def centred(rollouts: Rollouts) -> _Float:
    """r - mean(r) of the group, [R]."""
    groups_R, sizes_G = _groups(rollouts)
    means_G = np.bincount(groups_R, rollouts.rewards_R) / sizes_G
    difference: _Float = rollouts.rewards_R - means_G[groups_R]
    return difference


def standardised(rollouts: Rollouts, epsilon: float) -> _Float:
    """(r - mean(r)) / (std(r) + epsilon) of the group, by the population's standard deviation."""
    groups_R, sizes_G = _groups(rollouts)
    difference = centred(rollouts)
    deviations_G = np.sqrt(np.bincount(groups_R, difference**2) / sizes_G)
    scaled: _Float = difference / (deviations_G[groups_R] + epsilon)
    return scaled


def leave_one_out(rollouts: Rollouts) -> _Float:
    """r less the mean of the group's other rewards; 0 for a group of one."""
    groups_R, sizes_G = _groups(rollouts)
    scale_G = sizes_G / np.maximum(sizes_G - 1, 1)
    scaled: _Float = centred(rollouts) * scale_G[groups_R]
    return scaled


def whitened(values_R: _Float, num_tokens_R: NDArray[np.int64], epsilon: float) -> _Float:
    """(v - mean(v)) / (std(v) + epsilon) over all tokens of the step, whose values sum to 0."""
    share_R = num_tokens_R / max(num_tokens_R.sum(), 1)
    difference = values_R - share_R @ values_R
    scaled: _Float = difference / (np.sqrt(share_R @ difference**2) + epsilon)
    return scaled


def _groups(rollouts: Rollouts) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The index of each rollout's group, and the size of each group."""
    _, groups_R = np.unique(np.asarray(rollouts.group_ids), return_inverse=True)
    return groups_R, np.bincount(groups_R)


def aggregated(
    num_tokens_R: NDArray[np.int64], way: LossAggregation, length: int = 0
) -> TokenWeights:
    """Token weights and denominators of rollouts with these numbers of tokens.

    token_mean: every token of the step counts the same (DAPO, arXiv 2503.14476). sequence_mean:
    every rollout does, and within it every token (GRPO, arXiv 2402.03300). sequence_sum: a rollout
    is one action (RLOO, arXiv 2402.14740). constant: sequence_mean as if every rollout had `length`
    tokens (Dr. GRPO, arXiv 2503.20783).
    """
    ones_R = np.ones(len(num_tokens_R))
    match way:
        case "token_mean":
            return TokenWeights(weights_R=ones_R, denominators_R=num_tokens_R.astype(np.float64))
        case "sequence_mean":
            return TokenWeights(weights_R=1.0 / num_tokens_R, denominators_R=ones_R)
        case "constant":
            return TokenWeights(weights_R=ones_R / length, denominators_R=ones_R)
        case _:
            return TokenWeights(weights_R=ones_R, denominators_R=ones_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """The probability of each token now, relative to when it was sampled; without gradient."""

    proximal_log_ratio_BT: torch.Tensor | None
    """log pi_theta / pi_prox, relative to the start of the step; None: a step of one update, 0."""
    log_ratio_BT: torch.Tensor
    """log rho = log pi_theta / pi_behaviour; 0 for tokens that are not trainable."""
    advantages_BT: torch.Tensor
    loss_mask_BT: torch.Tensor

    @classmethod
    def of(cls, tokens: PolicyTokens) -> Self:
        now_BT, before_BT = tokens.logprobs_BT.detach(), tokens.proximal_logprobs_BT
        behaviour_BT = tokens.behaviour_logprobs_BT
        return cls(
            proximal_log_ratio_BT=None
            if before_BT is None
            else _masked(now_BT - before_BT, tokens),
            log_ratio_BT=_masked(now_BT - behaviour_BT, tokens),
            advantages_BT=tokens.advantages_BT,
            loss_mask_BT=tokens.loss_mask_BT,
        )

    @property
    def ratio_BT(self) -> torch.Tensor:
        """rho."""
        return self.log_ratio_BT.exp()

    @property
    def sequence_ratio_BT(self) -> torch.Tensor:
        """exp of the mean of log rho over the row, the same for every token of a row."""
        num_tokens_B = self.loss_mask_BT.sum(-1, keepdim=True).clamp(min=1)
        mean_B = self.log_ratio_BT.sum(-1, keepdim=True) / num_tokens_B
        return mean_B.exp().expand_as(self.log_ratio_BT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Importance weights; all [B, T] and without gradient."""

    weight_BT: torch.Tensor
    """w."""
    ratio_BT: torch.Tensor
    """w without bounds."""
    value_BT: torch.Tensor
    """The factor in the objective's value: w, or the limit where PPO's surrogate is clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """From rho = pi_theta / pi_behaviour to a weight with bounded variance, in PPO's clip range.

    rho contains both numerical differences between trainer and engine and the weight updates since
    sampling; IcePop was proposed for the former. The clip range (arXiv 1707.06347) gives no
    gradient that moves a ratio further out of it. In a step of several updates it is around the
    proximal policy, that at the start of the step, and the bound is for what that policy differs
    from the one that sampled (decoupled PPO, arXiv 2110.00641).
    """

    way: ImportanceMode
    """truncate: min(rho, c), as V-trace (arXiv 1802.01561) and truncated importance sampling do.
    mask: rho, and 0 beyond c (masked importance sampling). icepop: rho between `floor` and c, and 0
    outside (IcePop). none: 1, as if the weights in training had sampled everything; nothing is
    clipped either."""
    floor: float
    """Smallest ratio that icepop trains on."""
    cap: float
    """c."""
    low: float = inf
    """The clip range begins at 1 - low."""
    high: float = inf
    """The clip range ends at 1 + high."""
    several_updates: bool = False
    """Whether it knows the proximal policy."""
    decoupled: bool = False
    """Around the proximal policy also in a step of one update, where it clips nothing."""
    of_sequences: bool = False
    """Ratios of rows instead of tokens."""

    @classmethod
    def bounded(cls, config: TrainerConfig) -> Self:
        """Bounded as `config` says, without a clip range."""
        given = config.algorithm
        return cls(way=given.importance, floor=given.importance_floor, cap=given.importance_cap)

    @classmethod
    def clipped(
        cls,
        config: TrainerConfig,
        low: float,
        high: float,
        *,
        decoupled: bool = False,
        of_sequences: bool = False,
    ) -> Self:
        """Bounded as `config` says; `low` and `high` are the algorithm's defaults."""
        given = config.algorithm
        return cls(
            way=given.importance,
            floor=given.importance_floor,
            cap=given.importance_cap,
            low=low if given.clip_low is None else given.clip_low,
            high=high if given.clip_high is None else given.clip_high,
            several_updates=not of_sequences,
            decoupled=decoupled,
            of_sequences=of_sequences,
        )

    def __call__(self, ratios: Ratios) -> Weights:
        since_BT = ratios.proximal_log_ratio_BT
        if since_BT is not None:
            return self._around_proximal(ratios, since_BT.exp())
        ratio_BT = ratios.sequence_ratio_BT if self.of_sequences else ratios.ratio_BT
        weight_BT, ratio_BT = self._bounded(ratio_BT)
        if self.decoupled:
            return Weights(weight_BT=weight_BT, ratio_BT=ratio_BT, value_BT=weight_BT)
        clipped_BT, limit_BT = self._limits(ratio_BT, ratios.advantages_BT)
        return Weights(
            weight_BT=_where(~clipped_BT, weight_BT),
            ratio_BT=ratio_BT,
            value_BT=torch.where(clipped_BT, limit_BT, weight_BT),
        )

    def _around_proximal(self, ratios: Ratios, since_BT: torch.Tensor) -> Weights:
        weight_BT, ratio_BT = self._bounded(ratios.ratio_BT / since_BT)
        clipped_BT, limit_BT = self._limits(since_BT, ratios.advantages_BT)
        return Weights(
            weight_BT=_where(~clipped_BT, weight_BT * since_BT),
            ratio_BT=ratio_BT * since_BT,
            value_BT=weight_BT * torch.where(clipped_BT, limit_BT, since_BT),
        )

    def _bounded(self, ratio_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight within bounds, and the ratio that it is made of."""
        match self.way:
            case "truncate":
                return ratio_BT.clamp(max=self.cap), ratio_BT
            case "mask":
                return _where(ratio_BT <= self.cap, ratio_BT), ratio_BT
            case "icepop":
                within_BT = (ratio_BT >= self.floor) & (ratio_BT <= self.cap)
                return _where(within_BT, ratio_BT), ratio_BT
            case "none":
                return torch.ones_like(ratio_BT), torch.ones_like(ratio_BT)

    def _limits(
        self, ratio_BT: torch.Tensor, advantages_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a ratio is out of the range on the side that its advantage raises; the limits."""
        raised_BT = (advantages_BT > 0) & (ratio_BT > 1 + self.high)
        lowered_BT = (advantages_BT < 0) & (ratio_BT < 1 - self.low)
        limit_BT = torch.where(raised_BT, 1 + self.high, 1 - self.low).to(ratio_BT.dtype)
        return raised_BT | lowered_BT, limit_BT


def kl_estimate(difference: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """An estimate of the KL divergence from a frozen reference by sampled tokens, of any shape.

        d = log pi(t) - log pi_ref(t)
        k1 = d          unbiased, high variance
        k2 = d^2 / 2    its gradient is that of KL(pi || pi_ref), its value is biased
        k3 = exp(-d) - 1 + d      unbiased, never negative; used by GRPO (arXiv 2402.03300, eq. 4)

    In the loss k itself is differentiated: grad k1 is 0 on average. In the reward only the score
    is: there k1 gives the gradient of KL(pi || pi_ref), and k3 that minus the gradient of
    KL(pi_ref || pi), so next to nothing where the two policies are close. (J. Schulman,
    "Approximating KL divergence", 2020.)

    Args:
        difference: d of each token.
        estimator: k.
    """
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(-difference) + difference


def kl_penalty(config: TrainerConfig, tokens: PolicyTokens) -> torch.Tensor:
    """beta * sum_t u_t * k_t, differentiable in `tokens.logprobs_BT`.

    Tokens sampled by older weights are not corrected, as in GRPO.
    """
    if config.kl.loss == 0:
        return tokens.logprobs_BT.new_zeros(())
    difference_BT = _masked(tokens.logprobs_BT - tokens.reference_logprobs_BT, tokens)
    estimate_BT = kl_estimate(difference_BT, config.kl.estimator)
    return config.kl.loss * (estimate_BT * tokens.weights_BT).sum()


def kl_statistics(config: TrainerConfig, tokens: PolicyTokens) -> dict[str, torch.Tensor]:
    """k3, the estimator with the least noise, summed over tokens, if there is a reference."""
    if not config.algorithm.reference_column:
        return {}
    difference_BT = tokens.logprobs_BT.detach() - tokens.reference_logprobs_BT
    return {"reference_kl": kl_estimate(_masked(difference_BT, tokens), "k3").sum()}


class PolicyGradient:
    """A policy-gradient algorithm. It is stateless."""

    whole_groups = critic = False

    def __init__(
        self,
        config: TrainerConfig,
        *,
        baseline: Callable[[Rollouts], _Float],
        importance: Importance,
        aggregation: LossAggregation,
        whole_step: bool = False,
        of_logprobs: bool = False,
    ) -> None:
        """Choose the terms.

        Args:
            config: of the trainer, whose settings hold for all algorithms.
            baseline: from rewards to A, [R].
            importance: from ratios to w.
            aggregation: u and D, unless `algorithm.loss_aggregation` is set.
            whole_step: whether the baseline compares rollouts of different groups.
            of_logprobs: the objective is w * A * log pi_theta and not w * A, whose gradient is the
                same.

        Raises:
            ValueError: the aggregation needs `algorithm.loss_length`, and it is not set.
        """
        self._config = config
        self._baseline = baseline
        self.importance = importance
        chosen = config.algorithm.loss_aggregation
        self._aggregation = aggregation if chosen == "algorithm" else chosen
        self.whole_step = whole_step
        self.several_updates = importance.several_updates
        self._of_logprobs = of_logprobs
        if self._aggregation == "constant" and not config.algorithm.loss_length:
            raise ValueError(
                "algorithm.loss_length is 0, and the loss is divided by it: give the maximum "
                "number of tokens a rollout may sample"
            )

    def advantages(self, rollouts: Rollouts) -> _Float:
        """A, [R]."""
        return self._baseline(rollouts)

    def token_weights(self, num_tokens_R: NDArray[np.int64]) -> TokenWeights:
        """u and D."""
        return aggregated(num_tokens_R, self._aggregation, self._config.algorithm.loss_length)

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        """L * D over the micro-batch, with statistics of its ratios."""
        ratios = Ratios.of(tokens)
        weights = self.importance(ratios)
        value_BT = weights.value_BT
        if self._of_logprobs:
            value_BT = value_BT * tokens.logprobs_BT.detach()
        # 0 in value, the score function in gradient.
        score_BT = tokens.logprobs_BT - tokens.logprobs_BT.detach()
        surrogate_BT = tokens.advantages_BT * (value_BT + weights.weight_BT * score_BT)
        staleness_BT = tokens.staleness_BT.to(value_BT.dtype)
        decay_BT = torch.pow(self._config.algorithm.staleness_decay, staleness_BT)
        gain_BT = _masked(tokens.weights_BT * decay_BT * surrogate_BT, tokens)
        loss = kl_penalty(self._config, tokens) - gain_BT.sum()
        sums = _statistics(ratios, weights, tokens) | kl_statistics(self._config, tokens)
        return LossTerms(loss=loss, sums=sums, advantages_BT=tokens.advantages_BT)


def _statistics(ratios: Ratios, weights: Weights, tokens: PolicyTokens) -> dict[str, torch.Tensor]:
    mask_BT, weight_BT = ratios.loss_mask_BT, weights.weight_BT
    lowered_BT = (weight_BT > 0) & (weight_BT < weights.ratio_BT)
    return {
        # Tokens without gradient, and tokens with a bounded ratio.
        "clip_fraction": (mask_BT & (weight_BT == 0)).sum(),
        "cap_fraction": (mask_BT & lowered_BT).sum(),
        "ratio_mean": (ratios.ratio_BT * mask_BT).sum(),
        "log_ratio_squared_mean": ratios.log_ratio_BT.square().sum(),
        "train_rollout_logprob_abs_diff": ratios.log_ratio_BT.abs().sum(),
        "staleness_mean": (tokens.staleness_BT * mask_BT).sum(),
    }


def _masked(values_BT: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
    """The values of trainable tokens; 0 for others, whatever they have."""
    return _where(tokens.loss_mask_BT, values_BT)


def _where(kept_BT: torch.Tensor, values_BT: torch.Tensor) -> torch.Tensor:
    return torch.where(kept_BT, values_BT, values_BT.new_zeros(()))
