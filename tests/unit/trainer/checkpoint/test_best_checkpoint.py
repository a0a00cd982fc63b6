"""The best checkpoint: held while it is evaluated, kept while others are deleted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.checkpoint.best_checkpoint import BestCheckpoint


def checkpoint(folder: Path, step: int, content: str = "weights") -> Path:
    """A complete checkpoint."""
    made = folder / f"step_{step:09d}"
    made.mkdir(parents=True)
    (made / "shard").write_text(content)
    (made / ".complete").touch()
    return made


def test_the_best_checkpoint_survives_retention(tmp_path: Path) -> None:
    """It is held before the trainer deletes it; one that was not held is gone (control)."""
    best = BestCheckpoint(tmp_path)
    held = checkpoint(tmp_path, 10, "ten")
    assert best.hold(10)
    _remove(held)
    assert not best.hold(11)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 11"):
        best.keep(11, {"step": 11})
    checkpoint(tmp_path, 12, "twelve")
    assert best.hold(12)
    _remove(tmp_path / "step_000000012")
    kept = best.keep(12, {"step": 12})
    assert (kept / "shard").read_text() == "twelve"
    assert '"step": 12' in (kept / "best.json").read_text()


def test_a_crash_while_it_is_replaced_loses_nothing(tmp_path: Path) -> None:
    """Between the renames the old one is the best again."""
    best = BestCheckpoint(tmp_path)
    checkpoint(tmp_path, 10, "ten")
    best.hold(10)
    best.keep(10, {"step": 10})
    checkpoint(tmp_path, 20, "twenty")
    best.hold(20)
    best.path.rename(tmp_path / "best.old")
    again = BestCheckpoint(tmp_path)
    again.recover()
    assert (again.path / "shard").read_text() == "ten"
    assert [each.name for each in tmp_path.glob("best.*")] == ["best.candidate_000000020"]


def test_a_held_checkpoint_outlives_the_trainer(tmp_path: Path) -> None:
    """It is evaluated for longer than a process lives; what was half linked is no checkpoint."""
    step = checkpoint(tmp_path, 10, "ten")
    assert BestCheckpoint(tmp_path).hold(10)
    _remove(step)
    (tmp_path / "best.partial").mkdir()
    again = BestCheckpoint(tmp_path)
    again.recover()
    assert (again.keep(10, {"step": 10}) / "shard").read_text() == "ten"
    assert not list(tmp_path.glob("best.*"))


def test_one_that_is_not_deleted_yet_is_kept_without_being_held(tmp_path: Path) -> None:
    """As after a trainer that did not answer; a repeated call finds it kept."""
    step = checkpoint(tmp_path, 10, "ten")
    best = BestCheckpoint(tmp_path)
    best.keep(10, {"step": 10})
    _remove(step)
    kept = best.keep(10, {"step": 10})
    assert json.loads((kept / "best.json").read_text()) == {"step": 10}


def test_only_one_is_held(tmp_path: Path) -> None:
    """Step 0 holds none."""
    best = BestCheckpoint(tmp_path)
    for step in (10, 20):
        checkpoint(tmp_path, step)
        assert best.hold(step)
    assert [each.name for each in tmp_path.glob("best.*")] == ["best.candidate_000000020"]
    assert not best.hold(0)
    assert not list(tmp_path.glob("best.*"))


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
