"""A row without a field that the prompt or a reward names is no task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from services.chassis.errors import ConfigError
from services.lib.tasks.task_rows import Row, RowFields, task_of

NAMED = RowFields(required_fields=("question", "answer"))


def _row(values: Mapping[str, Any]) -> Row:
    return Row(index=2, values=values, where="tasks.jsonl line 3")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"question": "a"}, r"has no 'answer' \(it has question\)"),
        ({"question": "a", "answer": None}, "has null as 'answer'"),
        ({"task_id": "t", "payload": {"answer": "b"}}, r"has no 'question' \(it has answer\)"),
        ({"task_id": "t", "payload": {}}, r"has no 'question' \(it has no fields\)"),
    ],
)
def test_it_is_named_with_line_and_field(values: Mapping[str, Any], problem: str) -> None:
    """Null is no value either: as text it would be "null"."""
    with pytest.raises(ConfigError, match=rf"^tasks\.jsonl line 3 {problem}.*: give a value"):
        task_of(_row(values), NAMED)
    assert task_of(_row(values), RowFields()).name  # control: nothing names the fields


@pytest.mark.parametrize("answer", [0, False, "", [], {}])
def test_every_other_value_is_one(answer: object) -> None:
    assert task_of(_row({"question": "a", "answer": answer}), NAMED).name == "2"


def test_the_fields_are_those_that_the_agent_gets() -> None:
    """A template gives them names of their own."""
    made = RowFields(payload={"question": "{q}"}, required_fields=("question",))
    assert task_of(_row({"q": "a"}), made).payload_json == '{"question":"a"}'
    with pytest.raises(ConfigError, match="no 'q'"):
        task_of(_row({"q": "a"}), RowFields(payload={"x": "{q}"}, required_fields=("q",)))
