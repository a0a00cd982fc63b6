"""When an evaluation is the best, when training ends early, and what a crash leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from seamflow.client.turn import Task

from services.chassis.errors import ConfigError
from services.evaluator.config import EvaluatorConfig
from services.evaluator.evaluation_log import EvaluationLog, line_of
from services.evaluator.heldout_tasks import heldout_tasks, read_tasks
from services.lib.evaluation import (
    EvaluationConfig,
    EvaluationLine,
    label_of,
    pinned_task,
    shown,
)
from services.lib.tasks.task_rows import RowFields, TaskRow
from tests.lib.dataloader.support import environment_server


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


def test_the_last_tasks_of_an_environment_are_evaluated() -> None:
    """Those that the dataloader leaves out; too few are an error."""

    class Three:
        tasks = tuple({"number": index} for index in range(3))

        def reset(self, task: Task, seed: int) -> str:
            return task.task_id

        def step(self, message: object) -> object: ...

    def found(number: int) -> list[TaskRow]:
        tasks = {"tasks": f"environment://{address}", "num_heldout": number}
        config = EvaluatorConfig(run_id="run", folder=Path("unused"), **tasks)
        return asyncio.run(heldout_tasks(config))

    with environment_server(Three) as address:
        assert found(2) == [TaskRow("1", '{"number":1}'), TaskRow("2", '{"number":2}')]
        with pytest.raises(ConfigError, match="num_heldout is 3"):
            found(3)
