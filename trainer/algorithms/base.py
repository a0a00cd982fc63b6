"""What a reinforcement-learning algorithm is to the trainer: advantages, weights and a loss.

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

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "LossTerms",
    "PolicyTokens",
    "Rollouts",
    "TokenWeights",
    "make_algorithm",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """All rollouts of a step."""

    rewards_R: NDArray[np.float64]
    """What is to be made more."""
    group_ids: Sequence[str]
    """Rollouts of one group did the same task."""
    num_tokens_R: NDArray[np.int64]
    """Trainable tokens, of all sequences that the rollout gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """How token losses become the loss of a step: sum(weight * loss) / sum(count).

    Sums over tokens and over rollouts; neither needs the other rollouts, so a step can be computed
    piece by piece, in any order.
    """

    weights_R: NDArray[np.float64]
    """Weight of each trainable token of a rollout."""
    denominators_R: NDArray[np.float64]
    """What a rollout adds to the denominator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """What a loss is computed from, shaped [B, T] unless said."""

    logprobs_BT: torch.Tensor
    """Log-prob under the weights in training, after temperature; carries the gradient."""
    values_BT: torch.Tensor | None = None
    """What the critic expects before the token is chosen; carries the gradient."""
    behaviour_logprobs_BT: torch.Tensor
    """Log-prob recorded when it was sampled."""
    advantages_BT: torch.Tensor
    """Advantage of its rollout."""
    weights_BT: torch.Tensor
    """Weight of its loss; see `TokenWeights`."""
    reference_logprobs_BT: torch.Tensor
    """Log-prob under a frozen model, from the column `reference_column`; without one it is 0."""
    staleness_BT: torch.Tensor
    """Versions published since the weights it was sampled under."""
    loss_mask_BT: torch.Tensor
    """True where the loss counts; what else a tensor holds elsewhere means nothing."""
    rollouts_B: torch.Tensor
    """Number of each row's rollout, [B]; only equality means something."""
    groups_B: torch.Tensor
    """Number of each row's group, [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Sums over the trainable tokens of a micro-batch: they depend neither on how the step was cut
    into micro-batches nor on the ranks.
    """

    loss: torch.Tensor
    """Sum of weight times token loss; backward starts here."""
    sums: Mapping[str, torch.Tensor]
    """Sums to report as means over tokens, by metric name."""


class Algorithm(Protocol):
    """A plug-in. Its constructor takes the `TrainerConfig`."""

    @property
    def whole_step(self) -> bool:
        """True if advantages compare rollouts of different groups.

        Then none can be given before all groups of a step are there.
        """
        ...

    @property
    def whole_groups(self) -> bool:
        """True if the loss compares rollouts of a group: it sees all of them at once."""
        ...

    @property
    def critic(self) -> bool:
        """True if the loss is given `values_BT`."""
        ...

    def advantages(self, rollouts: Rollouts) -> NDArray[np.float64]:
        """Advantage of each rollout, [R]."""
        ...

    def token_weights(self, num_tokens_R: NDArray[np.int64]) -> TokenWeights:
        """Weights of the rollouts with so many trainable tokens, each at least 1."""
        ...

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        """Token losses of a micro-batch, summed. Uses no state: micro-batches come in any order."""
        ...


_HERE = "trainer.algorithms"
ALGORITHMS = {
    "cispo": f"{_HERE}.cispo:build",
    "dapo": f"{_HERE}.dapo:build",
    "decoupled_ppo": f"{_HERE}.decoupled_ppo:build",
    "distillation": f"{_HERE}.distillation:Distillation",
    "dpo": f"{_HERE}.dpo:build",
    "dr_grpo": f"{_HERE}.dr_grpo:build",
    "grpo": f"{_HERE}.grpo:build",
    "gspo": f"{_HERE}.gspo:build",
    "ma_ppo": f"{_HERE}.ma_ppo:build",
    "ppo": f"{_HERE}.ppo:build",
    "reinforce_pp": f"{_HERE}.reinforce_pp:build",
    "reinforce_pp_baseline": f"{_HERE}.reinforce_pp:build_with_baseline",
    "rloo": f"{_HERE}.rloo:build",
    "tba": f"{_HERE}.tba:build",
    "turn_ppo": f"{_HERE}.turn_ppo:build",
}


def make_algorithm(config: TrainerConfig) -> Algorithm:
    """The algorithm that `config.algorithm` names: a built-in, or "package.module:Name".

    Raises:
        ConfigError: neither of the two, or a setting it refuses, or cannot be streamed to.
    """
    algorithm: Algorithm = plugins.make("algorithm", config.algorithm, ALGORITHMS, config)
    for name in ("whole_step", "whole_groups", "critic"):
        if not hasattr(algorithm, name):
            raise ConfigError(
                f"algorithm {config.algorithm} has no {name}: say True or False, see "
                "trainer.algorithms.base.Algorithm"
            )
    if config.stream_groups and algorithm.whole_step:
        raise ConfigError(
            f"stream_groups is {config.stream_groups}: {config.algorithm} compares the rewards of "
            "a whole step, set it to 0 or take an algorithm that compares within groups"
        )
    return algorithm
