"""Which of a rollout's rewards training would use."""

from __future__ import annotations

from pathlib import Path

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import ConfigError
from services.launcher.checks.trained_rewards import trained_rewards
from services.launcher.config import LauncherConfig
from services.lib.evaluation.trained_reward import check_trained_reward


def rollout(*names: str) -> trajectory_pb2.Trajectory:
    """A finished one."""
    rewards = [tokens_pb2.Reward(name=name, value=1.0) for name in names]
    given = tokens_pb2.Rewards(rewards=rewards)
    return trajectory_pb2.Trajectory(rollout_id="t/0/1", rewards=given)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [(["reward"], ()), (["score"], ()), (["reward", "x"], ()), (["a", "b"], ("b",)), ([], ())],
)
def test_rewards_that_training_can_use(names: list[str], wanted: tuple[str, ...]) -> None:
    """One of those wanted; where none is, "reward" or the only one."""
    check_trained_reward(rollout(*names), wanted)


@pytest.mark.parametrize(
    ("names", "wanted", "would_use"), [(["b", "a"], (), "'reward'"), (["a"], ("c",), "'c'")]
)
def test_rewards_that_training_cannot_use(
    names: list[str], wanted: tuple[str, ...], would_use: str
) -> None:
    """The error names them, and a setting that works."""
    with pytest.raises(ConfigError) as raised:
        check_trained_reward(rollout(*names), wanted)
    assert f"training would use {would_use}" in str(raised.value)
    assert "set reward = 'a', or reward_weights = {a = 1.0}" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("", (), set()),
        ("[trainer.algorithm]\nreward = 'x'", (), {"x"}),
        ("[trainer.algorithm.reward_weights]\na = 1.0\nb = 2.0", (), {"a", "b"}),
        ("[trainer.algorithm]\nreward = 'x'", ("trainer.algorithm.reward=y",), {"y"}),
        ("", ('trainer.algorithm.reward_weights={"z": 1.0}',), {"z"}),
    ],
)
def test_the_trainers_settings_are_known(
    tmp_path: Path, text: str, given: tuple[str, ...], expected: set[str]
) -> None:
    """From the file and --set."""
    file = tmp_path / "train.toml"
    file.write_text(text)
    config = LauncherConfig(name="run", model="m", set=given)
    assert set(trained_rewards(config, file)) == expected


def test_variables_are_stronger_than_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the trainer itself."""
    file = tmp_path / "train.toml"
    file.write_text("[trainer.algorithm]\nreward = 'x'")
    monkeypatch.setenv("SEAMFLOW_TRAINER_ALGORITHM__REWARD", "z")
    config = LauncherConfig(name="run", model="m")
    assert set(trained_rewards(config, file)) == {"z"}
