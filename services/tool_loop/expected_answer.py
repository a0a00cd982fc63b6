"""Expected answers of tasks: one or several, each a text, a number or a truth value."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

from seamflow.environment import EnvironmentFailed

Expected = str | int | float | bool
_NUMBER = re.compile(
    r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:[eE][+-]?\d{1,4})?|[+-]?\.\d+(?:[eE][+-]?\d{1,4})?"
)


def expected_answers(value: Any, field: str, task_id: str) -> list[Expected]:
    """The answers of which each is right.

    Args:
        value: what the payload has, one answer or a list of them.
        field: of the payload, for the message.
        task_id: likewise.

    Raises:
        EnvironmentFailed: it is null, an object, or an empty list, so that no answer is right.
    """
    answers = value if isinstance(value, list) else [value]
    if not answers or not all(isinstance(each, Expected) for each in answers):
        shown = json.dumps(value, ensure_ascii=False)[:200]
        raise EnvironmentFailed(
            f"[tool_loop] answer_field names the field {field!r}, which is {shown} in task "
            f"{task_id!r}: give a text, a number, or a list of those that are right"
        )
    return answers


def as_text(expected: Expected) -> str:
    """The answer as people write it."""
    return expected.strip() if isinstance(expected, str) else json.dumps(expected)


def is_exactly(expected: Expected, answer: str) -> bool:
    """Whether `answer`, without space around it, is the expected one.

    Texts are equal character by character; a number equals each way to write it, as 4 does "4.0",
    and true and false in any case.
    """
    if isinstance(expected, str):
        return answer == expected.strip()
    if isinstance(expected, bool):
        return answer.lower() == as_text(expected)
    if not _NUMBER.fullmatch(answer):
        return False
    return Decimal(answer.replace(",", "")) == Decimal(as_text(expected))
