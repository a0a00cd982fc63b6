"""GRPO against a float64 reference written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.trainer.support import VOCABULARY, make_samples
from trainer.advantages import sequence_advantages
from trainer.algorithm import PolicyTokens
from trainer.algorithms.grpo import Grpo
from trainer.batch import plan, sequence, trainable_tokens
from trainer.policy import token_logprobs

GRPO = Grpo(clip_low=0.2, clip_high=0.28, importance_cap=2.0, advantage_epsilon=1e-4)


def reference(samples, logits, grpo):
    """Loss and its gradient with respect to the logits of each sample, token by token."""
    rewards = np.array([sample.rewards[0].value for sample in samples])
    groups = np.array([sample.group_id for sample in samples])
    count = sum(sum(sample.loss_mask) for sample in samples)
    loss, gradients = 0.0, []
    for sample, logit in zip(samples, logits, strict=True):
        peers = rewards[groups == sample.group_id]
        advantage = (sample.rewards[0].value - peers.mean()) / (
            peers.std() + grpo.advantage_epsilon
        )
        gradient = np.zeros_like(logit)
        for t in range(1, len(sample.loss_mask)):
            if not sample.loss_mask[t]:
                continue
            temperature = np.float64(np.float32(sample.temperature))
            exponents = np.exp(logit[t - 1] / temperature - (logit[t - 1] / temperature).max())
            probabilities = exponents / exponents.sum()
            token = sample.tokens.token_ids[t]
            ratio = probabilities[token] / np.exp(np.float64(sample.tokens.logprobs[t]))
            outside = ratio > 1 + grpo.clip_high if advantage > 0 else ratio < 1 - grpo.clip_low
            weight = 0.0 if outside and advantage != 0 else min(ratio, grpo.importance_cap)
            loss -= weight * advantage / count
            slope = (np.arange(VOCABULARY) == token) - probabilities
            gradient[t - 1] = -weight * advantage / count * slope / temperature
        gradients.append(gradient)
    return loss, gradients


def ours(samples, logits, grpo, micro_batch_tokens):
    """The same through sequences, micro-batches and autograd."""
    sequences = [sequence(sample) for sample in samples]
    advantages = sequence_advantages(sequences, grpo, "reward")
    leaves = {
        sample.sample_id: torch.tensor(logit, requires_grad=True)
        for sample, logit in zip(samples, logits, strict=True)
    }
    by_tokens = {bytes(item.token_ids_T): item.sample_id for item in sequences}
    (batches,) = plan(sequences, advantages, num_ranks=1, micro_batch_tokens=micro_batch_tokens)
    total, count = 0.0, trainable_tokens(sequences)
    for batch in batches:
        rows = []
        for row, mask in zip(batch.token_ids_BT, batch.loss_mask_BT, strict=True):
            name = by_tokens[bytes(row[: mask.nonzero()[0][-1] + 1])]
            leaf = leaves[name][: len(row)]
            rows.append(torch.cat([leaf, leaf.new_zeros(len(row) - len(leaf), VOCABULARY)]))
        logprobs = token_logprobs(
            torch.stack(rows)[:, :-1],
            torch.from_numpy(batch.token_ids_BT).long()[:, 1:],
            torch.from_numpy(batch.temperatures_B),
        )
        tokens = PolicyTokens(
            logprobs_BT=logprobs,
            behaviour_logprobs_BT=torch.from_numpy(batch.behaviour_logprobs_BT[:, 1:]).double(),
            advantages_BT=torch.from_numpy(batch.advantages_B)[:, None].expand_as(logprobs),
            weight_versions_BT=torch.from_numpy(batch.weight_versions_BT[:, 1:]),
            loss_mask_BT=torch.from_numpy(batch.loss_mask_BT[:, 1:]),
        )
        loss = grpo.loss(tokens).loss / count
        loss.backward()
        total += loss.item()
    return total, [leaves[sample.sample_id].grad.numpy() for sample in samples]


def make_logits(samples, seed):
    """Random float64 logits for every position of every sample."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(len(sample.loss_mask), VOCABULARY)) for sample in samples]


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_the_reference_on_ragged_batches_with_mixed_versions(seed):
    """To 1e-6 relative to the greatest gradient; here it is 1e-12."""
    samples = make_samples(seed, groups=4)
    logits = make_logits(samples, seed)
    loss, gradients = ours(samples, logits, GRPO, micro_batch_tokens=50)
    expected_loss, expected = reference(samples, logits, GRPO)
    assert loss == pytest.approx(expected_loss, abs=1e-12)
    for gradient, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, atol=1e-12)


def test_the_reference_notices_a_missing_importance_correction():
    """Negative control: with another cap the gradients differ by far more than the tolerance."""
    samples = make_samples(0)
    logits = make_logits(samples, 0)
    other = Grpo(clip_low=0.2, clip_high=0.28, importance_cap=1.0, advantage_epsilon=1e-4)
    _, gradients = ours(samples, logits, other, micro_batch_tokens=50)
    _, expected = reference(samples, logits, GRPO)
    assert max(abs(a - b).max() for a, b in zip(gradients, expected, strict=True)) > 1e-3


def test_gradient_depends_neither_on_micro_batching_nor_on_order():
    """One batch or many, forwards or backwards: equal to rounding."""
    samples = make_samples(1)
    logits = make_logits(samples, 1)
    loss, gradients = ours(samples, logits, GRPO, micro_batch_tokens=10_000)
    for budget, step in ((1, 1), (40, -1)):
        other_loss, others = ours(samples[::step], logits[::step], GRPO, budget)
        assert other_loss == pytest.approx(loss, abs=1e-12)
        for gradient, other in zip(gradients, others[::step], strict=True):
            np.testing.assert_allclose(other, gradient, atol=1e-13)


def test_advantages_are_standardised_within_each_group():
    """A group without variance has no advantage at all."""
    rewards = np.array([1.0, 5.0, 0.0, 5.0, 1.0, 5.0])
    advantages = GRPO.advantages(rewards, ["a", "b", "a", "b", "a", "b"])
    group = np.array([1.0, 0.0, 1.0])
    np.testing.assert_allclose(advantages[::2], (group - group.mean()) / (group.std() + 1e-4))
    np.testing.assert_array_equal(advantages[1::2], 0.0)


def test_a_rollout_with_two_sequences_counts_once_in_its_group():
    """A rewritten history must not weigh its reward twice."""
    samples = make_samples(2, groups=1, group_size=3)
    alone = sequence_advantages([sequence(sample) for sample in samples], GRPO, "reward")
    forked = type(samples[0])()
    forked.CopyFrom(samples[0])
    forked.sample_id = "fork"
    sequences = [sequence(sample) for sample in [*samples, forked]]
    np.testing.assert_array_equal(
        sequence_advantages(sequences, GRPO, "reward"), [*alone, alone[0]]
    )


def test_shuffled_rewards_keep_their_values_and_lose_their_rollouts():
    """The control experiment permutes over the whole batch, differently for each seed."""
    samples = make_samples(3, groups=6)
    sequences = [sequence(sample) for sample in samples]

    class Identity:
        def advantages(self, rewards, group_ids):
            return rewards

    straight = sequence_advantages(sequences, Identity(), "reward")
    shuffled = [
        sequence_advantages(sequences, Identity(), "reward", np.random.default_rng([7, step]))
        for step in (1, 1, 2)
    ]
    assert sorted(shuffled[0]) == sorted(straight)
    assert (shuffled[0] != straight).mean() > 0.5
    np.testing.assert_array_equal(shuffled[0], shuffled[1])
    assert (shuffled[0] != shuffled[2]).any()


def test_a_missing_reward_is_named():
    """The message holds the rollout, the wanted name and the names there are."""
    sequences = [sequence(sample) for sample in make_samples(4)]
    with pytest.raises(ValueError, match=r"no reward 'score' but \['reward'\]"):
        sequence_advantages(sequences, GRPO, "score")
