"""The one check of tasks: what the trajectory manager would refuse is refused before a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from seamflow.trajectory.v1.trajectory_pb2 import Task

from services.chassis.errors import ConfigError, ServiceError
from services.lib.bounds import MAX_PAYLOAD_BYTES
from services.lib.tasks.checked_tasks import CheckedTasks, checked_tasks
from services.lib.tasks.sources import Row
from services.lib.tasks.task_rows import RowFields
from trajectory_manager.api.validation import json_object, name

SKIP = RowFields(broken_rows="skip")


class Rows:
    """A source of rows with these values; None is one that cannot be read."""

    fingerprint = content = "rows"

    def __init__(self, *values: dict[str, Any] | None) -> None:
        self.values = values

    def rows(self, epoch: int, start: int) -> Iterator[Row]:
        """In their order."""
        for index, each in enumerate(self.values):
            where = f"line {index + 1}"
            problem = "" if each is not None else f"{where} is not JSON"
            yield Row(index=index, values=each or {}, where=where, problem=problem)


@pytest.mark.parametrize(
    "row",
    [
        {"task_id": "What is 2+2?"},
        {"task_id": "数学-1"},
        {"task_id": "a" * 201},
        {"task_id": "a" * 199},
        {"task_id": "-a"},
        {"task_id": "a\nb"},
        {"task_id": -1},
        {"task_id": 1.5e300},
        {"payload": {"x": "a" * MAX_PAYLOAD_BYTES}},
        {"payload": {"x": "é" * (MAX_PAYLOAD_BYTES // 2)}},
    ],
)
def test_what_the_store_refuses_is_no_task(row: dict[str, Any]) -> None:
    """Whichever way it would get there: in an epoch, as a rollout's name."""
    with pytest.raises(ConfigError, match="line 1"):
        checked_tasks(Rows({"payload": {}, **row}), RowFields(), 10)


@pytest.mark.parametrize("task_id", ["a", "a" * 150, 7, "x/y:z@1+2=3~4", "a.b_c-d"])
def test_what_passes_is_taken_by_the_store(task_id: object) -> None:
    """With an epoch or evaluation, a sample and an attempt, and with the greatest payload."""
    payload = {"x": "a" * (MAX_PAYLOAD_BYTES - 8)}
    (task,) = checked_tasks(Rows({"task_id": task_id, "payload": payload}), RowFields(), 10)
    for suffix in ("@1000000", "@step-1000000.0123abcd.v1000000"):
        sent = Task(task_id=task.name + suffix, payload_json=task.payload_json)
        assert name("rollout_id", f"{sent.task_id}/4096/99")
    assert json_object("payload_json", task.payload_json)
    with pytest.raises(ServiceError):  # the greatest indeed
        json_object("payload_json", task.payload_json.replace("}", " }"))


def test_all_broken_rows_are_named_at_once() -> None:
    """Of any kind, with their number; a bounded list."""
    good = [{"task_id": f"t{i}", "payload": {}} for i in range(198)]
    rows = Rows(*good[:50], None, *good[50:], {"task_id": "t3", "payload": {"x": 1}})
    with pytest.raises(ConfigError) as refused:
        checked_tasks(rows, RowFields(), 1000)
    for part in ("2 of 200 rows", "line 51 is not JSON", "line 200", "line 4", '"skip"'):
        assert part in str(refused.value)
    with pytest.raises(ConfigError, match="and 90 more") as refused:
        checked_tasks(Rows(*[None] * 100), RowFields(), 1000)
    assert len(str(refused.value)) < 1000


def test_broken_rows_are_skipped_and_counted_where_that_is_set() -> None:
    """Of two rows of one name the first is kept; without any task it is an error."""
    rows = Rows(None, {"task_id": "a", "payload": {"x": 1}}, {"task_id": "a", "payload": {}})
    checked = CheckedTasks(SKIP)
    assert [task.payload_json for task in checked.tasks(rows.rows(0, 0))] == ['{"x":1}']
    checked.finish()
    assert sorted(checked.broken) == [0, 2]
    with pytest.raises(ConfigError, match="no row is a task: line 1"):
        checked_tasks(Rows(None), SKIP, 10)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_the_rows_that_are_skipped_do_not_depend_on_their_order(order: tuple[int, ...]) -> None:
    """A shuffled source leaves out the same ones in each epoch."""
    rows = [*Rows({"task_id": 1}, {"task_id": 2}, {"task_id": "1"}, {"task_id": 1}).rows(0, 0)]
    checked = CheckedTasks(RowFields(payload_field="", broken_rows="skip"))
    assert len([*checked.tasks(rows[place] for place in order)]) == 2
    assert sorted(checked.broken) == [2, 3]
