"""From rewards to what each sequence is credited with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.lib.trainer.ranks.gradients import config
from tests.lib.trainer.support import make_samples
from trainer.algorithms import policy_gradient as baselines
from trainer.algorithms.base import LossTerms, PolicyTokens, Rollouts, TokenWeights, make_algorithm
from trainer.data.advantages import compute_advantages, overlong_penalty
from trainer.data.token_sequence import sequence

DAPO = config("dapo")


class Identity:
    """Rewards as they are."""

    whole_step = whole_groups = critic = False

    def advantages(self, rollouts: Rollouts) -> NDArray[np.float64]:
        return rollouts.rewards_R

    def token_weights(
        self,
        num_tokens_R: NDArray[np.int64],  # noqa: N803 -- named by the contract
    ) -> TokenWeights:
        return make_algorithm(DAPO).token_weights(num_tokens_R)

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        return make_algorithm(DAPO).loss(tokens)


def rollouts(rewards: list[float], groups: str) -> Rollouts:
    """A letter for each rollout's group."""
    return Rollouts(
        rewards_R=np.array(rewards),
        group_ids=list(groups),
        num_tokens_R=np.ones(len(rewards), np.int64),
    )


def test_a_group_without_variance_has_no_advantage() -> None:
    """By any baseline that looks at the group alone."""
    both = rollouts([1.0, 5.0, 0.0, 5.0, 1.0, 5.0], "ababab")
    advantages = baselines.standardised(both, 1e-4)
    group = np.array([1.0, 0.0, 1.0])
    np.testing.assert_allclose(advantages[::2], (group - group.mean()) / (group.std() + 1e-4))
    for found in (advantages, baselines.centred(both), baselines.leave_one_out(both)):
        np.testing.assert_array_equal(found[1::2], 0.0)


def test_a_group_of_one_has_no_advantage() -> None:
    """Leave-one-out gives it no advantage, and no division by nothing."""
    np.testing.assert_array_equal(
        baselines.leave_one_out(rollouts([3.0, 1.0, 2.0], "abb")), [0.0, -1.0, 1.0]
    )


def test_a_rollout_with_two_sequences_counts_once() -> None:
    """A rewritten history weighs its reward once, and all its tokens share the rollout's weight."""
    samples = make_samples(2, groups=1, group_size=3)
    forked = type(samples[0])()
    forked.CopyFrom(samples[0])
    forked.sample_id = "fork"
    grpo = config("grpo")
    alone = compute_advantages([sequence(s) for s in samples], make_algorithm(grpo), grpo)
    both = compute_advantages([sequence(s) for s in [*samples, forked]], make_algorithm(grpo), grpo)
    np.testing.assert_array_equal(both.advantages_N, [*alone.advantages_N, alone.advantages_N[0]])
    assert both.denominator == alone.denominator == 3
    assert both.weights_N[0] == both.weights_N[3] == alone.weights_N[0] / 2


def test_a_branch_with_a_reward_of_its_own_counts_for_itself() -> None:
    """It is compared with the rollouts of the group, and the rollout's weight is not shared."""
    samples = make_samples(2, groups=1, group_size=3)
    branch = type(samples[0])()
    branch.CopyFrom(samples[0])
    branch.sample_id = "branch"
    branch.turns[1].rewards.add(name="reward", value=-2.0, turn_id="t2")
    dapo = config("rloo")
    alone = [*samples, branch]
    given = compute_advantages([sequence(s) for s in alone], make_algorithm(dapo), dapo)
    totals = np.array([s.rewards[0].value for s in samples])
    totals = np.append(totals, totals[0] - 2.0)
    others = (totals.sum() - totals) / 3
    np.testing.assert_allclose(given.advantages_N, totals - others)
    end = len(branch.loss_mask)
    assert [list(each) for each in given.turn_rewards_N] == [[], [], [], [(end, -2.0)]]
    # Control: with shuffled rewards no turn has one.
    shuffle = np.random.default_rng(0)
    mixed = compute_advantages([sequence(s) for s in alone], make_algorithm(dapo), dapo, shuffle)
    assert not any(mixed.turn_rewards_N)


def test_a_rollout_without_tokens_is_compared_and_weighs_nothing() -> None:
    """Its reward counts for the baseline of the others; it has no trainable token."""
    samples = make_samples(2, groups=1, group_size=3)
    samples[1].loss_mask = bytes(len(samples[1].loss_mask))
    grpo = config("grpo")
    given = compute_advantages([sequence(s) for s in samples], make_algorithm(grpo), grpo)
    assert given.denominator == 2
    assert given.weights_N[1] == 0
    assert given.advantages_N[1] != 0


def test_shuffled_rewards_keep_their_values_and_lose_their_rollouts() -> None:
    """The control experiment permutes over the whole batch, differently for each seed."""
    sequences = [sequence(sample) for sample in make_samples(3, groups=6)]
    straight = compute_advantages(sequences, Identity(), DAPO).advantages_N
    shuffled = [
        compute_advantages(
            sequences, Identity(), DAPO, np.random.default_rng([7, step])
        ).advantages_N
        for step in (1, 1, 2)
    ]
    assert sorted(shuffled[0]) == sorted(straight)
    assert (shuffled[0] != straight).mean() > 0.5
    np.testing.assert_array_equal(shuffled[0], shuffled[1])
    assert (shuffled[0] != shuffled[2]).any()


def test_nearly_too_long_rollouts_lose_reward() -> None:
    """DAPO's equation 13 with 100 tokens at most and a buffer of 20."""
    lengths = np.array([1, 80, 85, 100, 101, 1000])
    np.testing.assert_allclose(overlong_penalty(lengths, 100, 20), [0, 0, -0.25, -1, -1, -1])
    np.testing.assert_allclose(overlong_penalty(lengths, 100, 0), [0, 0, 0, 0, -1, -1])


def test_the_penalty_is_part_of_the_reward() -> None:
    """By the tokens that the rollout sampled, before any comparison."""
    sequences = [sequence(sample) for sample in make_samples(4)]
    lengths = np.array([int(item.loss_mask_T.sum()) for item in sequences])
    shaped = config("dapo", algorithm__overlong_tokens=8, algorithm__overlong_buffer_tokens=4)
    difference = (
        compute_advantages(sequences, Identity(), shaped).advantages_N
        - compute_advantages(sequences, Identity(), DAPO).advantages_N
    )
    np.testing.assert_allclose(difference, overlong_penalty(lengths, 8, 4))
    assert -1 <= difference.min() < 0
