"""When an evaluation is the best, when training ends early, and what a crash leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.chassis.errors import ConfigError
from services.launcher.evaluation.best_checkpoint import BestCheckpoint
from services.launcher.evaluation.evaluation_config import EvaluationConfig
from services.launcher.evaluation.evaluation_log import EvaluationLine, EvaluationLog, line_of
from services.launcher.evaluation.evaluator import shown
from services.launcher.evaluation.heldout_tasks import (
    label_of,
    pinned_task,
    read_tasks,
)
from services.lib.tasks.task_rows import RowFields


def log_of(file: Path, means: list[float | None], **settings: Any) -> EvaluationLog:
    """Evaluations with these means, one every ten steps."""
    log = EvaluationLog(file, EvaluationConfig(every_steps=10, **settings))
    for number, mean in enumerate(means):
        is_best = mean is not None and log.is_better(mean)
        log.add(line(10 * number, mean, is_best=is_best))
    return log


def line(step: int, mean: float | None, **fields: Any) -> EvaluationLine:
    """An evaluation."""
    return EvaluationLine(
        label=f"step-{step}",
        step=step,
        weight_version=step,
        metric="success",
        num_tasks=2,
        num_rollouts=4,
        mean=mean,
        **fields,
    )


@pytest.mark.parametrize(
    ("means", "settings", "is_stopped"),
    [
        ([0.1, 0.5, 0.4, 0.5], {"stop_patience": 2}, True),
        ([0.1, 0.5, 0.4, 0.6], {"stop_patience": 2}, False),
        ([0.1, 0.5, None, None], {"stop_patience": 2}, False),  # given up: neither better nor worse
        ([0.1, 0.5, 0.55, 0.56], {"stop_patience": 2, "min_improvement": 0.1}, True),
        ([0.9, 0.5, 0.4, 0.3], {"stop_patience": 2, "goal": "min"}, False),
        ([0.1, 0.7], {"stop_target": 0.7}, True),
        ([0.1, 0.69], {"stop_target": 0.7}, False),
        ([0.9, 0.5], {"stop_target": 0.5, "goal": "min"}, True),
        ([0.5, 0.4, 0.3, 0.2], {}, False),
    ],
)
def test_training_ends_early(
    tmp_path: Path, means: list[float | None], settings: dict[str, Any], is_stopped: bool
) -> None:
    """By patience or target; the same after the file was read again."""
    file = tmp_path / "evaluation.jsonl"
    log = log_of(file, means, **settings)
    assert (log.stop_reason is not None) == is_stopped
    again = EvaluationLog(file, EvaluationConfig(every_steps=10, **settings))
    assert again.stop_reason == log.stop_reason
    assert again.best == log.best


def test_a_line_that_a_crash_cut_off_is_dropped(tmp_path: Path) -> None:
    """The next one is whole."""
    file = tmp_path / "evaluation.jsonl"
    log_of(file, [0.1, 0.2])
    with file.open("a") as opened:
        opened.write('{"step": 20, "me')
    log = EvaluationLog(file, EvaluationConfig())
    assert [each.step for each in log.lines] == [0, 10]
    log.add(line(30, 0.3))
    assert [each.step for each in EvaluationLog(file, EvaluationConfig()).lines] == [0, 10, 30]


def test_a_result_is_one_line() -> None:
    """Metric, margin, whether it is the best, and pass@k."""
    rewards = {str(task): [1.0, float(task < 5)] for task in range(10)}
    found = line_of(
        rewards, EvaluationConfig(), label="after", step=40, weight_version=41, metric="success"
    )
    assert shown(found).startswith("step 40: success 0.75 ± 0.")
    assert shown(found).endswith("pass@2 1.00")
    assert found.successes == {str(task): 1 + (task < 5) for task in range(10)}


def test_stopping_needs_evaluations() -> None:
    """The message names the cure."""
    with pytest.raises(ValidationError, match="give every_steps"):
        EvaluationConfig(stop_patience=2)


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
    with pytest.raises(FileNotFoundError):
        best.keep({"step": 11})
    checkpoint(tmp_path, 12, "twelve")
    assert best.hold(12)
    _remove(tmp_path / "step_000000012")
    kept = best.keep({"step": 12})
    assert (kept / "shard").read_text() == "twelve"
    assert '"step": 12' in (kept / "best.json").read_text()


def test_a_crash_while_it_is_replaced_loses_nothing(tmp_path: Path) -> None:
    """Between the renames the old one is the best again."""
    best = BestCheckpoint(tmp_path)
    checkpoint(tmp_path, 10, "ten")
    best.hold(10)
    best.keep({"step": 10})
    checkpoint(tmp_path, 20, "twenty")
    best.hold(20)
    best.path.rename(tmp_path / "best.old")
    again = BestCheckpoint(tmp_path)
    again.recover()
    assert (again.path / "shard").read_text() == "ten"
    assert not list(tmp_path.glob("best.*"))


def test_tasks_are_read_from_both_kinds_of_file(tmp_path: Path) -> None:
    """And each mistake names the line and the cure."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines, table = tmp_path / "t.jsonl", tmp_path / "t.parquet"
    lines.write_text('{"task_id": "a", "payload": {"x": 1}}\n\n')
    rows = [{"task_id": "a", "payload": {"x": 1}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    assert read_tasks(str(lines), RowFields()) == read_tasks(str(table), RowFields())
    task = pinned_task(read_tasks(str(lines), RowFields())[0], "step-3.17", 4, 2)
    assert (task.pinned_weight_version, task.num_samples) == (4, 2)
    assert label_of(task.task_id) == "step-3"
    for text, message in (
        ('{"task_id": "a"}', r"t.jsonl line 1.*payload"),
        ('{"task_id": "a", "payload": {}}\n' * 2, r"line 2 has the task id 'a', .* line 1"),
        ("{", "t.jsonl line 1"),
        ("", "holds no task"),
    ):
        lines.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_tasks(str(lines), RowFields())


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
