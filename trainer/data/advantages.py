"""From the rewards of rollouts to the advantage and the token weight of each sequence.

Shape suffixes: R rollouts, N sequences.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.algorithms.base import Algorithm, Rollouts, TokenWeights
from trainer.algorithms.policy_gradient import kl_estimate
from trainer.config import TrainerConfig
from trainer.data.token_sequence import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceAdvantages:
    """Advantages and token weights of the sequences of a gradient chunk."""

    advantages_N: NDArray[np.float64]
    """Advantage of each sequence's rollout, or of its branch."""
    turn_rewards_N: Sequence[Sequence[tuple[int, float]]]
    """Of each sequence: the tokens up to the end of a turn, and the turn's reward."""
    weights_N: NDArray[np.float64]
    """Weight of each of its trainable tokens."""
    bootstrap_N: NDArray[np.bool_]
    """True where the critic's value after the last token stands for rewards beyond a limit."""
    denominator: float
    """The chunk's term in the denominator of the step's loss; 0: it has no trainable token."""


def compute_advantages(
    sequences: Sequence[TokenSequence],
    algorithm: Algorithm,
    config: TrainerConfig,
    shuffle: np.random.Generator | None = None,
) -> SequenceAdvantages:
    """Compute advantages; a rollout of several sequences counts once in its group.

    Branches of a rollout that have rewards of different turns, or of their own samples, count once
    each.

    Args:
        sequences: of whole groups.
        shuffle: permutes the rewards over the rollouts: a control experiment without learning.

    Raises:
        ValueError: a rollout has no reward of the configured name.
    """
    rollouts = _rollouts(sequences, config)
    if shuffle is not None:
        rollouts = replace(rollouts, rewards_R=shuffle.permutation(rollouts.rewards_R))
    weights = _weights(_counted(sequences, rollouts, config), algorithm)
    advantages_R = algorithm.advantages(rollouts)
    name, bootstrap = config.algorithm.trained_reward, config.algorithm.bootstrap_truncated
    places = {key: place for place, key in enumerate(_members(sequences, name))}
    rows = [places[_member(item, name)] for item in sequences]
    return SequenceAdvantages(
        advantages_N=advantages_R[rows],
        # Shuffled rewards belong to no turn.
        turn_rewards_N=[() if shuffle else _of_turns(item, name) for item in sequences],
        weights_N=weights.weights_R[rows],
        bootstrap_N=np.array([bootstrap and item.truncated for item in sequences], np.bool_),
        denominator=float(weights.denominators_R.sum()),
    )


def overlong_penalty(
    num_tokens_R: NDArray[np.int64], limit: int, buffer: int
) -> NDArray[np.float64]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), from 0 down to -1.

    0 up to `limit - buffer` tokens, then falling linearly, -1 above `limit`.
    """
    over_R = num_tokens_R - (limit - buffer)
    if buffer == 0:
        return -(over_R > 0).astype(np.float64)
    penalty: NDArray[np.float64] = -np.clip(over_R / buffer, 0.0, 1.0)
    return penalty


_Member = tuple[str, frozenset[str]]
"""A rollout, and the turns whose rewards count for one or more of its branches; or the sample."""


def _member(item: TokenSequence, name: str) -> _Member:
    if name in item.own_rewards:
        return item.rollout_id, frozenset([item.sample_id])
    turns = frozenset(reward.turn_id for reward in item.turn_rewards if reward.name == name)
    return item.rollout_id, turns


def _members(sequences: Sequence[TokenSequence], name: str) -> dict[_Member, TokenSequence]:
    """One sequence of each member."""
    return {_member(item, name): item for item in sequences}


def _of_turns(item: TokenSequence, name: str) -> list[tuple[int, float]]:
    return [(reward.end, reward.value) for reward in item.turn_rewards if reward.name == name]


def _rollouts(sequences: Sequence[TokenSequence], config: TrainerConfig) -> Rollouts:
    name = config.algorithm.trained_reward
    members = _members(sequences, name)
    counts: Counter[_Member] = Counter()
    for item in sequences:
        counts[_member(item, name)] += int(item.loss_mask_T.sum())
    num_tokens_R = np.array([counts[member] for member in members], np.int64)
    rewards_R = np.array([item.rewards[name] for item in members.values()], np.float64)
    if config.algorithm.overlong_tokens:
        rewards_R += overlong_penalty(
            num_tokens_R,
            config.algorithm.overlong_tokens,
            config.algorithm.overlong_buffer_tokens,
        )
    if config.kl.reward:
        rewards_R -= config.kl.reward * _divergences(sequences, members, config)
    return Rollouts(
        rewards_R=rewards_R,
        group_ids=[item.group_id for item in members.values()],
        num_tokens_R=num_tokens_R,
    )


def _divergences(
    sequences: Sequence[TokenSequence],
    members: Mapping[_Member, TokenSequence],
    config: TrainerConfig,
) -> NDArray[np.float64]:
    """The KL estimate of each rollout from the reference at sampling, summed over its tokens."""
    sums = dict.fromkeys(members, 0.0)
    for item in sequences:
        difference_T = item.behaviour_logprobs_T.astype(np.float64) - item.reference_logprobs_T
        kept = torch.from_numpy(difference_T[item.loss_mask_T])
        member = _member(item, config.algorithm.trained_reward)
        sums[member] += kl_estimate(kept, config.kl.reward_estimator).sum().item()
    return np.array(list(sums.values()), np.float64)


def _counted(
    sequences: Sequence[TokenSequence], rollouts: Rollouts, config: TrainerConfig
) -> NDArray[np.int64]:
    """Tokens of each rollout in the loss: none of one that was cut off and is masked."""
    if not config.algorithm.mask_truncated:
        return rollouts.num_tokens_R
    members = _members(sequences, config.algorithm.trained_reward)
    cut_off = {item.rollout_id for item in sequences if item.rollout_truncated}
    return rollouts.num_tokens_R * [rollout_id not in cut_off for rollout_id, _ in members]


def _weights(num_tokens_R: NDArray[np.int64], algorithm: Algorithm) -> TokenWeights:
    """Token weights; 0 for rollouts without a trainable token."""
    found_R = num_tokens_R > 0
    weights = algorithm.token_weights(num_tokens_R[found_R])
    weights_R, denominators_R = np.zeros(len(num_tokens_R)), np.zeros(len(num_tokens_R))
    weights_R[found_R], denominators_R[found_R] = weights.weights_R, weights.denominators_R
    return TokenWeights(weights_R=weights_R, denominators_R=denominators_R)
