"""A run that cannot learn is named; `make test-health` tries more.

That one that can is not: tests/system/end_to_end/test_training_run.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.suites.health.lived import live
from tests.suites.health.recomputed import differing, recomputed, shown, stored_rollouts
from tests.suites.health.way import is_named, run
from tests.suites.health.ways import RESUMED, WAYS


@pytest.mark.long(short="tests/system/end_to_end/test_training_run.py")
def test_a_reward_that_is_always_0_is_named_while_the_run_goes_on(tmp_path: Path) -> None:
    """With its cure, after a few steps."""
    way = next(each for each in WAYS if each.name == "reward_always_0")
    found = run(way, tmp_path / "run")
    assert is_named(way, found), found


@pytest.mark.timeout(600)
async def test_a_run_that_is_stopped_killed_and_resumed_is_told_truly(tmp_path: Path) -> None:
    """No alarm, and each figure is that of its files and its store.

    *Control*: whichever figure is changed is found.
    """
    way = replace(RESUMED[0], settings=("trainer.num_steps=8",))
    lived = await asyncio.to_thread(live, way, tmp_path / "run", (2, 5))
    assert lived.false_alarms == []
    assert lived.differ == []
    folder = tmp_path / "run" / "runs" / "health"
    said, true = shown(folder), recomputed(folder, await stored_rollouts(folder))
    assert said["summary.lives"] == 3
    for name in said:
        (found,) = differing({**said, name: said[name] + 3.0 + said[name] / 10}, true)
        assert found.startswith(f"{name}: ")


def test_a_group_of_one_is_refused_before_the_start(tmp_path: Path) -> None:
    """Nothing was started."""
    way = next(each for each in WAYS if each.name == "group_of_one")
    found = run(way, tmp_path / "run")
    assert is_named(way, found), found
    assert not found.step
