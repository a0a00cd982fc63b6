"""Fields of a payload, filled from a row."""

from __future__ import annotations

import pytest

from services.chassis.errors import ConfigError
from services.lib.tasks.task_rows import Row, filled

ROW = Row(
    index=3,
    where="tasks.jsonl:3",
    values={"q": "1 + 1", "n": 7, "list": [1, "b"], "none": None, "in": {"a": 2}},
)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("text", "text"),
        ("{q}", "1 + 1"),
        ("{n}", 7),
        ("{list}", [1, "b"]),
        ("{in[a]}", 2),
        ("say {q}: {n}", "say 1 + 1: 7"),
        ("{n:03d}", "007"),
        ("all of {list}", 'all of [1, "b"]'),
        ("{{n}}", "{n}"),
    ],
)
def test_a_field_alone_keeps_its_type(template: str, value: object) -> None:
    """Within text lists are JSON; braces are written twice."""
    assert filled(template, ROW) == value


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{missing}", "has no field 'missing'"),
        ("{in[b]}", "has no field 'b'"),
        ("{none}", "has null as 'none'"),
        ("a {none}", "has null as 'none'"),
        ("{q", "payload has the template '{q'"),
        ("{q.upper}", "has a dot"),
        ("{q.__class__}", "has a dot"),
        ("{}", "write fields as"),
    ],
)
def test_a_template_that_cannot_be_filled_is_an_error(template: str, said: str) -> None:
    """It names the row, the field and the cure; attributes of a value are no fields."""
    with pytest.raises(ConfigError) as refused:
        filled(template, ROW)
    assert said in str(refused.value)
