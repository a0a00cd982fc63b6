"""The interface of an algorithm: advantages, token weights and a loss.

Shape suffixes: B rows of a micro-batch, T positions that are predicted, R rollouts of the step.
"""
# ruff: noqa: N803, N815 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.chassis import plugins
from services.chassis.errors import ConfigError
from trainer.config import TrainerConfig
from trainer.config.optimization import ALGORITHMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """All rollouts of a step."""

    rewards_R: NDArray[np.float64]
    group_ids: Sequence[str]
    """Rollouts of one group belong to the same task."""
    num_tokens_R: NDArray[np.int64]
    """Trainable tokens, over all sequences of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """How token losses become the loss of a step: sum(weight * loss) / sum(denominator).

    The sums are over tokens and over rollouts. No term depends on other rollouts, so a step can be
    computed chunk by chunk, in any order.
    """

    weights_R: NDArray[np.float64]
    """Weight of each trainable token of a rollout."""
    denominators_R: NDArray[np.float64]
    """The term of a rollout in the denominator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The inputs of a loss, shaped [B, T] unless stated otherwise."""

    logprobs_BT: torch.Tensor
    """Log-prob under the weights in training, after temperature; carries the gradient."""
    values_BT: torch.Tensor | None = None
    """The critic's value before the token is sampled; carries the gradient."""
    behaviour_logprobs_BT: torch.Tensor
    """Log-prob recorded at sampling."""
    proximal_logprobs_BT: torch.Tensor | None = None
    """Log-prob under the weights at the start of the step; None: those are the ones in training,
    as the step has one update."""
    proximal_values_BT: torch.Tensor | None = None
    """The critic's value under those weights."""
    end_values_B: torch.Tensor | None = None
    """The critic's value after the last token of rows that a limit cut off, else 0, [B]; without
    gradient. None: the episode ends with each row."""
    advantages_BT: torch.Tensor
    weights_BT: torch.Tensor
    """Weight of its loss; see `TokenWeights`."""
    turn_rewards_BT: torch.Tensor
    """Reward of a turn at the last trainable token up to its end, or at its end if there is none;
    else 0. Part of its rollout's reward."""
    reference_logprobs_BT: torch.Tensor
    """Log-prob under a frozen model, from `algorithm.reference_column`; 0 without one."""
    staleness_BT: torch.Tensor
    """Versions published since the weights it was sampled with."""
    loss_mask_BT: torch.Tensor
    """True for trainable tokens; values of other tokens are undefined."""
    rollouts_B: torch.Tensor
    """Number of each row's rollout, [B]; for comparison only."""
    groups_B: torch.Tensor
    """Number of each row's group, [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Sums over the trainable tokens of a micro-batch, so that the results of a step do not depend
    on its micro-batches or ranks.
    """

    loss: torch.Tensor
    """Sum of weight times token loss; backward starts here."""
    sums: Mapping[str, torch.Tensor]
    """Sums to report as means over tokens, by metric name."""
    advantages_BT: torch.Tensor | None = None
    """Advantage that each trainable token was weighed with, without gradient, for people; None:
    there is none."""


class Algorithm(Protocol):
    """A plug-in. Its constructor takes the `TrainerConfig`.

    One whose loss uses `proximal_logprobs_BT` also has the attribute `several_updates`, True: its
    steps may have several.
    """

    @property
    def whole_step(self) -> bool:
        """True if advantages compare rollouts of different groups.

        They can only be computed when all groups of a step are complete.
        """
        ...

    @property
    def whole_groups(self) -> bool:
        """True if the loss compares rollouts of a group, and needs all of them in a micro-batch."""
        ...

    @property
    def critic(self) -> bool:
        """True if the loss needs `values_BT`."""
        ...

    def advantages(self, rollouts: Rollouts) -> NDArray[np.float64]:
        """Advantage of each rollout, [R]."""
        ...

    def token_weights(self, num_tokens_R: NDArray[np.int64]) -> TokenWeights:
        """Weights for rollouts of these lengths in trainable tokens, each at least 1."""
        ...

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        """The summed token losses of a micro-batch. Stateless: micro-batches come in any order."""
        ...


def make_algorithm(config: TrainerConfig) -> Algorithm:
    """The algorithm that `config.algorithm.name` names: a built-in, or "package.module:Name".

    Raises:
        ConfigError: it does not exist, rejects a setting, cannot be streamed, or lacks a critic.
    """
    algorithm: Algorithm = plugins.make("algorithm", config.algorithm.name, ALGORITHMS, config)
    for name in ("whole_step", "whole_groups", "critic"):
        if not hasattr(algorithm, name):
            raise ConfigError(
                f"algorithm {config.algorithm.name} has no attribute {name}: set it to True or "
                "False, see trainer.algorithms.base.Algorithm"
            )
    if config.critic == "model" and not algorithm.critic:
        raise ConfigError(
            f"critic is 'model' but algorithm {config.algorithm.name} has no critic: remove "
            "critic, or use ppo, ma_ppo or turn_ppo"
        )
    if config.algorithm.bootstrap_truncated and not algorithm.critic:
        raise ConfigError(
            f"algorithm.bootstrap_truncated is true but {config.algorithm.name} has no critic: set "
            "it to false, or use ppo, ma_ppo or turn_ppo"
        )
    if config.algorithm.several_updates and not getattr(algorithm, "several_updates", False):
        raise ConfigError(
            f"algorithm.num_epochs is {config.algorithm.num_epochs} and num_mini_batches "
            f"{config.algorithm.num_mini_batches}, but {config.algorithm.name} has no trust region "
            "around the policy at the start of a step: set both to 1, or use ppo, grpo or dapo"
        )
    for name in ("stream_groups", "start_at_tail"):
        value = getattr(config.batch, name)
        if value and algorithm.whole_step:
            raise ConfigError(
                f"batch.{name} is {value}: {config.algorithm.name} compares the rewards of a whole "
                f"step, set it to {type(value)()} or use an algorithm that compares within groups"
            )
    return algorithm
