"""Lengths, equal groups and cut answers of a step are counted by rollout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from trainer.data.token_sequence import TokenSequence
from trainer.model.token_predictions import _entropies, _scaled_logprobs, token_logprobs
from trainer.tracking.step_record import (
    completion_lengths,
    cut_rollouts,
    equal_groups,
    other_rewards,
)


def item(rollout: str, group: str, reward: float, length: int = 3) -> TokenSequence:
    """A sequence of which all tokens but the first are trainable."""
    zeros = np.zeros(length, np.float32)
    return TokenSequence(
        sample_id=f"{rollout}/0",
        rollout_id=rollout,
        group_id=group,
        token_ids_T=np.zeros(length, np.int32),
        behaviour_logprobs_T=zeros,
        reference_logprobs_T=zeros,
        loss_mask_T=np.arange(length) > 0,
        weight_versions_T=np.zeros(length, np.int64),
        temperatures_T=zeros + 1,
        rewards={"reward": reward},
    )


def test_groups_without_differences() -> None:
    """One of two groups has different rewards; a group of one has none."""
    equal = [item("a", "g", 1.0), item("b", "g", 1.0)]
    different = [item("c", "h", 0.0), item("d", "h", 1.0)]
    assert equal_groups([*equal, *different], "reward") == {"share_equal_groups": 0.5}
    assert equal_groups([item("e", "i", 1.0)], "reward") == {"share_equal_groups": 1.0}
    assert equal_groups([], "reward") == {}
    rounded = [item("a", "g", 0.1 + 0.2), item("b", "g", 0.3)]  # the store takes them as equal
    assert equal_groups([*rounded, *different], "reward") == {"share_equal_groups": 0.5}


def test_a_reward_may_have_the_name_of_a_metric() -> None:
    """It has a prefix that no metric has; the trained one is not repeated."""
    rewards = {"loss": 1.0, "step": 2.0, "acc@1": 0.5, "reward": 1.0}
    items = [dataclasses.replace(item(name, "g", 1.0), rewards=rewards) for name in "ab"]
    means = {"reward/acc@1": 0.5, "reward/loss": 1.0, "reward/step": 2.0}
    assert other_rewards(items, "reward") == means


def test_lengths_are_those_of_rollouts() -> None:
    """Two sequences of one rollout count together."""
    found = completion_lengths([item("a", "g", 0, 3), item("a", "g", 0, 5), item("b", "g", 0, 3)])
    assert found == {"completion_tokens_mean": 4.0, "completion_tokens_max": 6.0}


def test_a_rollout_is_cut_if_one_of_its_sequences_is() -> None:
    """And the mean reward of those is told beside the mean of all."""
    cut = dataclasses.replace(item("a", "g", 0.5), cut=True)
    found = cut_rollouts([cut, item("a", "g", 0.5), item("b", "g", 1.0)], "reward")
    assert found == {"share_cut": 0.5, "reward_cut_mean": 0.5}
    assert cut_rollouts([item("b", "g", 1.0)], "reward") == {"share_cut": 0.0}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_entropy_is_that_of_the_sampling_distribution(temperature: float) -> None:
    """Next to torch's own; a token that cannot be sampled counts 0."""
    logits = torch.randn(4, 7, 300, generator=torch.Generator().manual_seed(1))
    logits[..., 5] = -torch.inf
    temperatures = torch.full((4, 7), temperature)
    finite = torch.cat([logits[..., :5], logits[..., 6:]], -1) / temperature
    expected = torch.distributions.Categorical(logits=finite).entropy()  # type: ignore[no-untyped-call]
    found = _entropies(_scaled_logprobs(logits, temperatures))
    assert torch.allclose(found, expected, atol=1e-5)
    ids = torch.zeros(4, 7, dtype=torch.int64)
    assert token_logprobs(logits, ids, temperatures).shape == found.shape
