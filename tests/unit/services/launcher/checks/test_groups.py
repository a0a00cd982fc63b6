"""Groups of one are refused where an algorithm compares the rollouts of a group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.chassis.errors import ConfigError
from services.launcher.checks.prerequisites import check_groups
from services.lib.group_baseline import compares_groups
from tests.lib.launcher.support import make_config
from tests.lib.trainer.support import trainer_config
from trainer.algorithms.base import Rollouts, make_algorithm
from trainer.config.optimization import ALGORITHMS


def _file(folder: Path, text: str) -> Path:
    (folder / "run.toml").write_text(text)
    return folder / "run.toml"


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("", "launcher.group_size"),
        ('[trainer.algorithm]\nname = "rloo"', "launcher.group_size"),
        ("[dataloader]\ngroup_size = 1", "dataloader.group_size"),
    ],
)
def test_a_group_of_one_is_refused_with_setting_value_and_cure(
    tmp_path: Path, text: str, setting: str
) -> None:
    """The default algorithm compares too."""
    with pytest.raises(ConfigError, match=f"{setting} is 1, .* Set {setting} to 2 or more"):
        check_groups(make_config(group_size=1), _file(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        '[trainer.algorithm]\nname = "ppo"',
        '[trainer.algorithm]\nname = "own.module:Algorithm"',
        "[dataloader]\ngroup_size = 4",
        "[dataloader]\nmax_samples = 8",
    ],
)
def test_a_group_of_one_that_learns_is_not(tmp_path: Path, text: str) -> None:
    """A critic, an algorithm that nobody knows, groups whose size is set elsewhere."""
    check_groups(make_config(group_size=1), _file(tmp_path, text))


def test_larger_groups_are_fine(tmp_path: Path) -> None:
    """Two rollouts are enough."""
    check_groups(make_config(group_size=2), _file(tmp_path, ""))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_what_learns_alone_is_what_the_algorithms_say(tmp_path: Path, name: str) -> None:
    """Advantages of groups of one are 0, or the loss compares, or it has a teacher."""
    changes = {"name": name, "reference_column": "ref", "loss_length": 9 * (name == "dr_grpo")}
    checkpoint = {"folder": tmp_path}
    config = trainer_config(run_id="r", model="m", checkpoint=checkpoint, algorithm=changes)
    algorithm = make_algorithm(config)
    rewards = np.array([0.0, 1.0, 3.0])
    alone = Rollouts(rewards_R=rewards, group_ids=["a", "b", "c"], num_tokens_R=np.ones(3, int))
    has_signal = bool(algorithm.advantages(alone).any()) and not algorithm.whole_groups
    assert compares_groups(name) == (not has_signal and name != "distillation")
