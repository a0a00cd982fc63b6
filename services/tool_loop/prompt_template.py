"""The user message of a task: a text with fields of its payload."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from string import Formatter
from typing import Any

from seamflow.client.turn import Task
from seamflow.environment import EnvironmentFailed


class PromptTemplate:
    """A text such as "Solve {question}"; "{{" and "}}" are braces."""

    def __init__(self, text: str) -> None:
        """Parse it.

        Raises:
            ValueError: names the setting, the part that is wrong and the cure.
        """
        self._parts = list(_parts(text))

    @property
    def fields(self) -> Sequence[str]:
        """Of the payload, each once."""
        return list(dict.fromkeys(field for _, field in self._parts if field is not None))

    def render(self, task: Task) -> str:
        """The text for a task.

        Raises:
            EnvironmentFailed: the payload lacks a field, or has null there.
        """
        return "".join(
            text + ("" if field is None else _text(payload_field("prompt", task, field)))
            for text, field in self._parts
        )


def payload_field(setting: str, task: Task, field: str) -> Any:
    """A field of the payload, which `setting` names.

    Raises:
        EnvironmentFailed: names field, task and the fields that there are.
    """
    if (value := task.payload.get(field)) is not None:
        return value
    has = "has as null" if field in task.payload else "lacks"
    there = ", ".join(sorted(map(str, task.payload))) or "none"
    raise EnvironmentFailed(
        f"[tool_loop] {setting} names the field {field!r}, which task {task.task_id!r} {has}; its "
        f"fields are: {there}"
    )


def _parts(text: str) -> Iterator[tuple[str, str | None]]:
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(
            f"prompt is {text!r}: {error}; write {{field}} for a field of the payload, and {{{{ or "
            "}} for a brace"
        ) from error
    for literal, field, form, conversion in parsed:
        if field is not None and (form or conversion or not field.isidentifier()):
            raise ValueError(
                f"prompt has {{{field}}}: write the name of one field in the braces, and {{{{ or "
                "}} for a brace"
            )
        yield literal, field


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
