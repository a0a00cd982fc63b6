"""Which of a rollout's rewards training would use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import ConfigError
from services.launcher.checks.run_settings import check_reward_names, trained_rewards
from services.launcher.config import LauncherConfig
from services.lib.evaluation import check_trained_reward
from services.tool_loop.config import ToolLoopConfig
from tests.lib.trainer.support import trainer_config


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


TWO = {"correct": "math", "format": "regex:^x$"}


def checked(
    folder: Path, rewards: dict[str, str], launcher: Mapping[str, object], **algorithm: object
) -> list[str]:
    """The warnings of a run whose tool loop has these rewards."""
    trained = {f"algorithm__{name}": value for name, value in algorithm.items()}
    settings = {
        "trainer": trainer_config(run_id="run", model=folder, checkpoint__folder=folder, **trained),
        "tool_loop": ToolLoopConfig(rewards=rewards),
    }
    own = {"name": "run", "model": "m", "environment": "tool_loop", "tasks": "t.jsonl"}
    config = LauncherConfig.model_validate({**own, **launcher})
    return check_reward_names(config, settings)


@pytest.mark.parametrize(
    ("launcher", "algorithm", "parts"),
    [
        ({}, {"reward_weights": {"correct": 1.0, "fromat": 1.0}}, ("'fromat'", "'format'")),
        ({}, {"reward": "success"}, ("'success'", "'correct', 'format'")),
        ({}, {}, ("none is named",)),
        ({"zero_variance_reward": "corect"}, {"reward": "correct"}, ("zero_variance", "'correct'")),
        ({"reward_name": "x"}, {"reward": "correct"}, ("reward_name", "'x'")),
        ({}, {"reward": "reward_model"}, ("'reward_model'",)),
    ],
)
def test_a_name_that_no_rollout_has_is_refused(
    tmp_path: Path, launcher: dict[str, object], algorithm: dict[str, object], parts: tuple[str]
) -> None:
    """With the setting, and those there are."""
    with pytest.raises(ConfigError) as refused:
        checked(tmp_path, TWO, launcher, **algorithm)
    assert [part for part in parts if part not in str(refused.value)] == []


def test_names_that_rollouts_have_or_may_have_pass(tmp_path: Path) -> None:
    """A function may return several, so that the first rollouts tell; control of the test above."""
    weights = {"correct": 1.0, "format": 0.2}
    assert checked(tmp_path, TWO, {"zero_variance_reward": "correct"}, reward_weights=weights) == []
    assert checked(tmp_path, {"only": "exact"}, {}) == []
    assert checked(tmp_path, {"a": "my_module:reward"}, {}, reward="b") == []


def test_a_reward_model_that_is_not_trained_on_is_told(tmp_path: Path) -> None:
    """It is computed for nothing; named anywhere, it is not."""
    model = {"reward_model": "models/judge"}
    (warning,) = checked(tmp_path, {"correct": "math"}, model, reward="correct")
    assert "'models/judge'" in warning
    assert "reward = 'reward_model'" in warning
    weights = {"correct": 1.0, "reward_model": 0.5}
    assert checked(tmp_path, {"correct": "math"}, model, reward_weights=weights) == []
