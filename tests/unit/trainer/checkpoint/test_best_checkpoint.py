"""The best checkpoint: held while it is evaluated, kept while others are deleted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trainer.checkpoint import checkpoint_files
from trainer.checkpoint.best_checkpoint import BestCheckpoint

SHARD = checkpoint_files.shard_name(0, 1)


def checkpoint(folder: Path, step: int, content: str = "weights") -> Path:
    """A complete checkpoint."""
    partial = checkpoint_files.begin(folder, step)
    (partial / SHARD).write_text(content)
    state = checkpoint_files.Checkpoint(
        run_id="r", step=step, weight_version=0, world_size=1, settings={}, record={}
    )
    return checkpoint_files.complete(partial, state, keep=9)


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
    assert (kept / SHARD).read_text() == "twelve"
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
    again.recover(20)
    assert (again.path / SHARD).read_text() == "ten"
    assert [each.name for each in tmp_path.glob("best.*")] == ["best.candidate_000000020"]


def test_a_held_checkpoint_outlives_the_trainer(tmp_path: Path) -> None:
    """It is evaluated for longer than a process lives; what was half linked is no checkpoint."""
    step = checkpoint(tmp_path, 10, "ten")
    assert BestCheckpoint(tmp_path).hold(10)
    _remove(step)
    (tmp_path / ".partial_best").mkdir()
    again = BestCheckpoint(tmp_path)
    again.recover(20)
    assert (again.keep(10, {"step": 10}) / SHARD).read_text() == "ten"
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


def test_a_step_that_is_made_again_is_kept_as_it_is_now(tmp_path: Path) -> None:
    """What was held is of weights that were undone; the control is one that was not made again."""
    best = BestCheckpoint(tmp_path)
    checkpoint(tmp_path, 20, "undone")
    assert best.hold(20)
    _remove(tmp_path / "step_000000020")
    best.recover(20)
    assert [each.name for each in tmp_path.glob("best.*")] == ["best.candidate_000000020"]
    checkpoint(tmp_path, 20, "again")
    assert (best.keep(20, {"step": 20, "value": 1.0}) / SHARD).read_text() == "again"
    assert best.keep(20, {"step": 20, "value": 1.0}) == best.path


def test_a_held_step_after_the_one_that_is_resumed_from_is_dropped(tmp_path: Path) -> None:
    """Whoever keeps it before it is made again is told so."""
    best = BestCheckpoint(tmp_path)
    checkpoint(tmp_path, 10)
    step = checkpoint(tmp_path, 20)
    assert best.hold(20)
    step.rename(tmp_path / "damaged_step_000000020")
    best.recover(10)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 20"):
        best.keep(20, {"step": 20})


def test_a_damaged_step_is_never_the_best(tmp_path: Path) -> None:
    """Its files are those that were held; the best before stays."""
    best = BestCheckpoint(tmp_path)
    checkpoint(tmp_path, 10, "ten")
    best.keep(10, {"step": 10})
    step = checkpoint(tmp_path, 20, "twenty")
    assert best.hold(20)
    (step / SHARD).write_text("damage")
    with pytest.raises(FileNotFoundError, match="differs from its checksum"):
        best.keep(20, {"step": 20})
    assert (best.path / SHARD).read_text() == "ten"


def test_another_value_of_a_step_that_is_gone_is_no_repeated_call(tmp_path: Path) -> None:
    """The best checkpoint is of the step before it was made again."""
    best = BestCheckpoint(tmp_path)
    gone = checkpoint(tmp_path, 10)
    best.keep(10, {"step": 10, "value": 0.5, "interval": (0.0, 1.0)})
    _remove(gone)
    assert best.keep(10, {"step": 10, "value": 0.5, "interval": (0.0, 1.0)}) == best.path
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 10"):
        best.keep(10, {"step": 10, "value": 0.7, "interval": (0.0, 1.0)})


def test_what_people_call_best_stays(tmp_path: Path) -> None:
    """A folder, a link, a copy of ours, notes in ours: all are still there."""
    best = BestCheckpoint(tmp_path)
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "mine.txt").write_text("mine")
    (tmp_path / "best.candidate_mine").mkdir()
    for step in (10, 20):
        checkpoint(tmp_path, step, str(step))
        best.keep(step, {"step": step})
        (best.path / "notes.txt").write_text(f"of {step}")
        shutil.copytree(best.path, tmp_path / f"best.old{step}")
    shutil.copytree(best.path, tmp_path / "best.old")
    best.recover(20)
    assert (best.path / SHARD).read_text() == "20"
    texts = {path.read_text() for path in tmp_path.rglob("*.txt")}
    assert texts == {"mine", "of 10", "of 20"}
    assert {path.name for path in tmp_path.glob("best.*")} == {
        *("best.candidate_mine", "best.old", "best.old10", "best.old20")
    }


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
