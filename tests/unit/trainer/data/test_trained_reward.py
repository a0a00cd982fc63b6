"""Which of a rollout's rewards is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from trainer.config import AlgorithmConfig
from trainer.data.token_sequence import TokenSequence, TurnReward
from trainer.leasing.accepted_samples import unknown_rewards, with_trained_reward


def _sequence(rewards: Mapping[str, float], *turn_rewards: TurnReward) -> TokenSequence:
    return TokenSequence(
        sample_id="s",
        rollout_id="task/0/1",
        group_id="task",
        token_ids_T=np.zeros(2, np.int32),
        behaviour_logprobs_T=np.zeros(2, np.float32),
        reference_logprobs_T=np.zeros(2, np.float32),
        loss_mask_T=np.ones(2, np.bool_),
        weight_versions_T=np.zeros(2, np.int64),
        temperatures_T=np.ones(2, np.float32),
        rewards=rewards,
        turn_rewards=turn_rewards,
    )


@pytest.mark.parametrize(
    ("settings", "rewards", "trained"),
    [
        ({}, {"reward": 0.5, "success": 1.0}, 0.5),
        ({}, {"success": 1.0}, 1.0),
        ({"reward": "success"}, {"reward": 0.5, "success": 1.0}, 1.0),
        ({"reward_weights": {"a": 1.0, "b": -0.5}}, {"a": 2.0, "b": 1.0, "c": 9.0}, 1.5),
        ({"reward_weights": {"a": 1.0, "b": 0.5}}, {"b": 1.0}, 0.5),
        ({"reward_weights": {"reward": 2.0}}, {"reward": 1.0}, 2.0),
    ],
)
def test_the_trained_reward_follows_the_settings(
    settings: dict[str, object], rewards: Mapping[str, float], trained: float
) -> None:
    """By name, the only one, or a weighted sum; the others stay."""
    algorithm = AlgorithmConfig(**settings)
    found = with_trained_reward(_sequence(rewards), algorithm).rewards
    assert found == {**rewards, algorithm.trained_reward: trained}


def test_rewards_of_turns_are_weighted_alike() -> None:
    """Each turn's part of the sum is its own rewards' part."""
    item = _sequence(
        {"a": 3.0, "b": 1.0},
        TurnReward("a", 3.0, 1, "t1"),
        TurnReward("c", 5.0, 1, "t1"),
        TurnReward("b", 1.0, 2, "t2"),
    )
    found = with_trained_reward(item, AlgorithmConfig(reward_weights={"a": 1.0, "b": 0.5}))
    assert found.turn_rewards == (
        TurnReward("reward", 3.0, 1, "t1"),
        TurnReward("reward", 0.5, 2, "t2"),
    )
    assert sum(each.value for each in found.turn_rewards) == found.rewards["reward"]


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({"reward": "sucess"}, {"success": 1.0}),
        ({}, {"a": 1.0, "b": 1.0}),
        ({}, {}),
        ({"reward_weights": {"d": 1.0}}, {"a": 1.0}),
    ],
)
def test_a_rollout_without_the_reward_is_named(
    settings: dict[str, object], rewards: Mapping[str, float]
) -> None:
    """The message names task, rollout, what it has and the setting."""
    item = replace(_sequence(rewards))
    with pytest.raises(ValueError, match=r"rollout 'task/0/1' of task 'task' has no reward") as got:
        with_trained_reward(item, AlgorithmConfig(**settings))
    assert str(sorted(rewards)) in str(got.value)
    assert "algorithm.reward_weights" in str(got.value)


def test_names_that_no_rollout_has_are_told() -> None:
    """By setting, with the nearest that there is; nothing is told where all are there."""
    named = {"algorithm.reward_weights": {"correct": 1.0, "fromat": 1.0}, "zero_variance": {""}}
    text = unknown_rewards(named, {"correct", "format"})
    assert "algorithm.reward_weights names 'fromat' (did you mean 'format'?)" in text
    assert "zero_variance" not in text
    assert unknown_rewards(named, {"correct", "fromat", "other"}) == ""
