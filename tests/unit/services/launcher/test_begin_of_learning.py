"""From when the seconds count that tokens are divided by."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from seamflow.inspect.lives import lives, note, note_learning

from services.chassis.errors import ConfigError
from services.launcher.checks.prerequisites import check_prerequisites
from tests.lib.launcher.support import make_config, make_layout


def step(number: int, end: float) -> str:
    """A line of a step that took 2 s, with its waits."""
    return json.dumps({"step": number, "time": end, "seconds": {"wait": 1.5, "train": 0.5}}) + "\n"


def test_a_step_that_was_made_before_counts_with_its_seconds(tmp_path: Path) -> None:
    """Of this life alone: steps of lives before lie before its start."""
    now = time.time()
    for state, ago in (("started", 100.0), ("stopped", 50.0), ("started", 20.0)):
        note(tmp_path, state, when=now - ago)
    (tmp_path / "metrics.jsonl").write_text(step(1, now - 60.0))
    assert note_learning(tmp_path) == 0.0
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(step(2, now - 8.0) + step(3, now - 6.0))
    ahead = note_learning(tmp_path)
    assert lives(tmp_path)[-1].learning == pytest.approx(now - 10.0)
    assert ahead >= 10.0


def test_a_disk_that_refuses_the_record_of_lives_ends_no_run(tmp_path: Path) -> None:
    """Without a recorded life no step is of this one."""
    (tmp_path / "metrics.jsonl").write_text(step(1, time.time() - 5.0))
    assert note_learning(tmp_path) == 0.0


def test_a_model_that_is_missing_where_nothing_prepares_it_is_named_at_once(tmp_path: Path) -> None:
    """What `prepare` makes lies in the run's folder, and is not there yet."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.toml").touch()
    config = make_config(prepare="my_module", model=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="none"):
        check_prerequisites(config, make_layout(config, tmp_path / "run"))
    within = make_config(prepare="my_module")
    check_prerequisites(within, make_layout(within, tmp_path / "run"))
