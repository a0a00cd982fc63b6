"""Groups of one are refused where they would teach nothing."""

from __future__ import annotations

import pytest

from services.chassis.errors import ConfigError
from services.lib.group_baseline import check_group_size, compares_groups
from trainer.config.optimization import ALGORITHMS


def test_each_built_in_algorithm_is_known() -> None:
    """Those that learn alone have a critic, a teacher, or the step's mean as baseline."""
    alone = {name for name in ALGORITHMS if not compares_groups(name)}
    assert alone == {"distillation", "ma_ppo", "ppo", "reinforce_pp", "turn_ppo"}


@pytest.mark.parametrize(
    ("size", "algorithm"), [(2, "grpo"), (1, "ppo"), (1, "my.module:Algorithm")]
)
def test_groups_that_can_teach_are_taken(size: int, algorithm: str) -> None:
    """A plug-in knows itself what it compares."""
    check_group_size("launcher.group_size", size, algorithm)


def test_a_group_of_one_is_refused_with_its_cure() -> None:
    """By setting, value and algorithm."""
    with pytest.raises(ConfigError) as refused:
        check_group_size("launcher.group_size", 1, "grpo")
    for part in ("launcher.group_size is 1", "'grpo'", "2 or more", "ppo"):
        assert part in str(refused.value)
