"""A run that cannot learn is named; `make test-health` tries more.

That one that can is not: tests/system/end_to_end/test_training_run.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.suites.health.lived import live
from tests.suites.health.recomputed import shown
from tests.suites.health.way import is_named, run
from tests.suites.health.ways import RESUMED, WAYS


@pytest.mark.long(short="tests/system/end_to_end/test_training_run.py")
def test_a_reward_that_is_always_0_is_named_while_the_run_goes_on(tmp_path: Path) -> None:
    """With its cure, after a few steps."""
    way = next(each for each in WAYS if each.name == "reward_always_0")
    found = run(way, tmp_path / "run")
    assert is_named(way, found), found


@pytest.mark.timeout(600)
def test_a_run_that_is_stopped_killed_and_resumed_is_told_truly(tmp_path: Path) -> None:
    """No alarm, and each figure is that of its files and its store.

    *Control*: tests/unit/suites/health/test_recomputed.py.
    """
    way = replace(RESUMED[0], settings=("trainer.num_steps=8",))
    lived = live(way, tmp_path / "run", (2, 5))
    assert lived.false_alarms == []
    assert lived.differ == []
    assert shown(tmp_path / "run" / "runs" / "run")["summary.lives"] == 3


def test_a_group_of_one_is_refused_before_the_start(tmp_path: Path) -> None:
    """Nothing was started."""
    way = next(each for each in WAYS if each.name == "group_of_one")
    found = run(way, tmp_path / "run")
    assert is_named(way, found), found
    assert not found.step
