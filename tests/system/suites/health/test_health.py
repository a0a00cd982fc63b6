"""A run that cannot learn is named; `make test-health` tries more.

That one that can is not: tests/system/end_to_end/test_training_run.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suites.health.way import is_named, run
from tests.suites.health.ways import WAYS


@pytest.mark.long(short="tests/system/end_to_end/test_training_run.py")
def test_a_reward_that_is_always_0_is_named_while_the_run_goes_on(tmp_path: Path) -> None:
    """With its cure, after a few steps."""
    way = next(each for each in WAYS if each.name == "reward_always_0")
    found = run(way, tmp_path / "run")
    assert is_named(way, found), found


def test_a_group_of_one_is_refused_before_the_start(tmp_path: Path) -> None:
    """Nothing was started."""
    way = next(each for each in WAYS if each.name == "group_of_one")
    found = run(way, tmp_path / "run")
    assert is_named(way, found), found
    assert not found.step
