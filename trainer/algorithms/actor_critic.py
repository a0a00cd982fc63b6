"""PPO with a critic (arXiv 1707.06347) and generalised advantages (GAE, arXiv 1506.02438).

The algorithms differ in what an action is: a token, a few tokens, or a whole turn. For the actions
1..K of a sequence, with V_k the critic's value before action k,

    delta_k = r_k + gamma * V_{k+1} - V_k            V_{K+1} = 0, or the value after action K
    A_k = sum_{j >= k} (gamma * lambda)^(j - k) * delta_j
    L = -J + c / N * sum_k n_k * (V_k - (A_k + V_k without gradient))^2

J is PPO's clipped surrogate, in which each of the n_k tokens of action k has the advantage A_k. The
critic is a layer on the policy's last hidden states or a model of its own. In a step of one update
the values are those of the same forward pass; with several, A_k is computed from the values at the
begin of the step. Advantages are not whitened over the step. The reward of a turn is the r_k of its
last action, or of the last action before a turn that is not trained; if there is none, no action of
the sequence has it. That of the rollout is the r_K: each sequence of a rollout with a rewritten
history ends with it. V_{K+1} is the value after the last token where a limit cut a rollout off and
`algorithm.bootstrap_truncated` is set.

Shape suffixes: B rows of a micro-batch, T positions that are predicted, K actions of a row.
"""
# ruff: noqa: N802, N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from trainer.algorithms.base import LossTerms, PolicyTokens
from trainer.algorithms.policy_gradient import Importance, PolicyGradient
from trainer.config import TrainerConfig

_BLOCK = 256
"""Actions whose advantages are one matrix product."""


def ppo(config: TrainerConfig) -> ActorCritic:
    """PPO with a critic: every token is an action."""
    return ActorCritic(config, action_tokens=1)


def ma_ppo(config: TrainerConfig) -> ActorCritic:
    """MA-PPO of MA-RLHF (arXiv 2410.02743): n consecutive tokens are one action.

    These are the paper's fixed n-grams, which never cross the end of a turn: values are learned and
    advantages estimated over n times fewer actions.
    """
    return ActorCritic(config, action_tokens=config.algorithm.macro_action_tokens)


def turn_ppo(config: TrainerConfig) -> ActorCritic:
    """PPO with a critic of turns, after ArCHer (arXiv 2402.19446): a whole turn is one action.

    The critic estimates the value before each turn, and all tokens of the turn share its advantage,
    as in ArCHer's hierarchy of an utterance-level critic over a token-level policy. Unlike
    ArCHer's, the critic is trained on-policy by TD(lambda): no replay buffer, no target network, no
    second critic.
    """
    return ActorCritic(config, action_tokens=None)


class ActorCritic(PolicyGradient):
    """The algorithm of the module docstring; its advantages of rollouts are their rewards."""

    critic = True

    def __init__(self, config: TrainerConfig, action_tokens: int | None) -> None:
        """Build the algorithm from `config`.

        Args:
            config: of the trainer.
            action_tokens: longest action, within a turn; None: an action is a turn.
        """
        super().__init__(
            config,
            baseline=lambda rollouts: rollouts.rewards_R,
            importance=Importance.clipped(config, low=0.2, high=0.2),
            aggregation="token_mean",
        )
        self._action_tokens = action_tokens
        self._discount, self._lambda = config.algorithm.discount, config.algorithm.gae_lambda
        self._value_weight = config.algorithm.value_weight

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        assert tokens.values_BT is not None, "the model has no critic"
        actions = _Actions.of(tokens.loss_mask_BT, self._action_tokens)
        values_BK = actions.firsts(tokens.values_BT)
        before_BK = values_BK.detach()
        if tokens.proximal_values_BT is not None:
            before_BK = actions.firsts(tokens.proximal_values_BT)
        advantages_BK = self._of_actions(before_BK, tokens, actions)
        policy = super().loss(replace(tokens, advantages_BT=actions.of_tokens(advantages_BK)))
        counted_BT = tokens.weights_BT * tokens.loss_mask_BT
        errors_BK = (values_BK - before_BK - advantages_BK).square() * actions.sums(counted_BT)
        found = {
            "value_error": (errors_BK.detach()).sum(),
            "value_mean": (actions.of_tokens(before_BK) * tokens.loss_mask_BT).sum(),
        }
        return LossTerms(
            loss=policy.loss + self._value_weight * errors_BK.sum(),
            sums={**policy.sums, **found},
            advantages_BT=policy.advantages_BT,
        )

    def _of_actions(
        self, values_BK: torch.Tensor, tokens: PolicyTokens, actions: _Actions
    ) -> torch.Tensor:
        """A of each action; 0 after the last action."""
        after_BK = torch.cat([values_BK[:, 1:], values_BK.new_zeros(len(values_BK), 1)], 1)
        if tokens.end_values_B is not None:
            after_BK = torch.where(actions.last_BK, tokens.end_values_B[:, None], after_BK)
        of_turns_BK = actions.sums(tokens.turn_rewards_BT)
        rest_B = tokens.advantages_BT[:, 0] - tokens.turn_rewards_BT.sum(1)
        rewards_BK = of_turns_BK + torch.where(actions.last_BK, rest_B[:, None], 0.0)
        deltas_BK = torch.where(
            actions.real_BK, rewards_BK + self._discount * after_BK - values_BK, 0.0
        )
        return generalised_advantages(deltas_BK, self._discount * self._lambda)


def generalised_advantages(deltas_BK: torch.Tensor, decay: float) -> torch.Tensor:
    """sum_{j >= k} decay^(j - k) * delta_j, [B, K]: a matrix product for each block of actions.

    RLHFuse (arXiv 2409.13221, section 5) replaces the recursion over actions by a matrix product;
    in blocks its memory is linear in K, not quadratic.
    """
    num_rows, num_actions = deltas_BK.shape
    blocks = -(-num_actions // _BLOCK)
    padded = torch.nn.functional.pad(deltas_BK, (0, blocks * _BLOCK - num_actions))
    steps = torch.arange(_BLOCK, device=deltas_BK.device)
    ahead = (steps[:, None] - steps).to(deltas_BK.dtype)  # j - k of row j and column k
    powers = torch.where(ahead >= 0, decay ** ahead.clamp(min=0), 0.0)
    within = padded.view(num_rows, blocks, _BLOCK) @ powers
    to_next = decay ** (_BLOCK - steps).to(deltas_BK.dtype)
    for block in range(blocks - 2, -1, -1):
        within[:, block] += within[:, block + 1, :1] * to_next
    return within.flatten(1)[:, :num_actions]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Actions:
    """Which tokens form an action."""

    first_BT: torch.Tensor
    """True at the first token of an action."""
    number_BT: torch.Tensor
    """Action of each trainable token, from 0; 0 elsewhere."""
    mask_BT: torch.Tensor
    """True for trainable tokens."""
    num_actions: int
    """K."""

    @classmethod
    def of(cls, mask_BT: torch.Tensor, action_tokens: int | None) -> Self:
        """Split turns, which are runs of trainable tokens, into actions."""
        first_BT = mask_BT & ~torch.nn.functional.pad(mask_BT, (1, 0))[:, :-1]
        if action_tokens is not None:
            places_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
            begins_BT = torch.where(first_BT, places_T, 0).cummax(1).values
            first_BT = mask_BT & ((places_T - begins_BT) % action_tokens == 0)
        number_BT = torch.where(mask_BT, first_BT.cumsum(1) - 1, 0)
        num_actions = int(first_BT.sum(1).max().clamp(min=1))
        return cls(first_BT=first_BT, number_BT=number_BT, mask_BT=mask_BT, num_actions=num_actions)

    @property
    def real_BK(self) -> torch.Tensor:
        """True for the actions that a row has."""
        steps_K = torch.arange(self.num_actions, device=self.mask_BT.device)
        return steps_K < self.first_BT.sum(1, keepdim=True)

    @property
    def last_BK(self) -> torch.Tensor:
        """True for the last action of a row."""
        steps_K = torch.arange(self.num_actions, device=self.mask_BT.device)
        return steps_K == self.first_BT.sum(1, keepdim=True) - 1

    def firsts(self, values_BT: torch.Tensor) -> torch.Tensor:
        """The value at the first token of each action, [B, K]."""
        return self._added(values_BT, self.first_BT)

    def sums(self, values_BT: torch.Tensor) -> torch.Tensor:
        """Over the tokens of each action, [B, K]."""
        return self._added(values_BT, self.mask_BT)

    def of_tokens(self, values_BK: torch.Tensor) -> torch.Tensor:
        """Of each token's action, [B, T]."""
        return values_BK.gather(1, self.number_BT)

    def _added(self, values_BT: torch.Tensor, where_BT: torch.Tensor) -> torch.Tensor:
        zeros_BK = values_BT.new_zeros(len(values_BT), self.num_actions)
        kept_BT = torch.where(where_BT, values_BT, values_BT.new_zeros(()))
        return zeros_BK.scatter_add(1, self.number_BT, kept_BT)
