"""Rows as tasks: a name and what the agent gets, by the settings of their fields."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal, Protocol

from services.chassis.errors import ConfigError
from services.lib.bounds import MAX_PAYLOAD_BYTES, MAX_ROW_NAME, NAME_CHARACTERS, is_name

_NAME, _PAYLOAD = "task_id", "payload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task of a source."""

    index: int
    """Position in the source, the same in every epoch."""
    values: Mapping[str, Any]
    where: str
    """For error messages: file and line, or function and position."""
    problem: str = ""
    """Why it cannot be read, with the cure; empty: it can."""


class Source(Protocol):
    """Tasks in an order that depends on the source, the seed and the epoch alone."""

    @property
    def fingerprint(self) -> str:
        """Identifies the source as release 0.2 does, whose positions have it alone."""

    @property
    def content(self) -> str:
        """A digest of all tasks: a stored position is valid only for the same. "": none is known.

        The same for a copy at another place and time; computed once.
        """

    def rows(self, epoch: int, start: int) -> Iterator[Row]:
        """The rows of an epoch from position `start` on; reads lazily, and may block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFields:
    """Which fields of a row name the task and hold what the agent gets."""

    task_id_field: str = _NAME
    """Names the task; "" names tasks by their position. A row without a `task_id` is named by it
    too, unless another field is set here."""
    payload_field: str = _PAYLOAD
    """Holds what the agent gets; "" gives it the whole row, as rows without a `payload` do unless
    another field is set here."""
    payload: Mapping[str, str] = field(default_factory=dict)
    """Templates of the fields that the agent gets instead; empty if there is none."""
    broken_rows: Literal["refuse", "skip"] = "refuse"
    """Whether a row that is no task ends the run before it begins, or is left out."""
    required_fields: Collection[str] = ()
    """What the agent gets must have each of them, and not null."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task that a row describes."""

    name: str
    """Unique in its source."""
    payload_json: str
    """What the agent gets, an object."""


def task_of(row: Row, fields: RowFields) -> TaskRow:
    """The task of a row.

    Raises:
        ConfigError: it cannot be read, has no usable name or payload, cannot be JSON, or the
            trajectory manager does not take it; names row and cure.
    """
    if row.problem:
        raise ConfigError(row.problem)
    name, payload = _name(row, fields.task_id_field), _payload(row, fields)
    _check_required(payload, fields.required_fields, row)
    return TaskRow(name, _json(payload, row))


def _check_required(payload: Mapping[str, Any], required: Collection[str], row: Row) -> None:
    for name in required:
        if payload.get(name) is None:
            there = ", ".join(sorted(map(str, payload))) or "no fields"
            problem = f"null as {name!r}" if name in payload else f"no {name!r} (it has {there})"
            raise ConfigError(
                f"{row.where} has {problem}, which the prompt, a reward or required_fields names: "
                "give a value, or name another field"
            )


def _name(row: Row, field_name: str) -> str:
    if not field_name or (field_name == _NAME and field_name not in row.values):
        return str(row.index)
    if field_name not in row.values:
        cure = 'set task_id_field to the field that names the task, or to "" for positions'
        raise ConfigError(f"{row.where} has no {field_name!r}: add it, or {cure}")
    name = row.values[field_name]
    if isinstance(name, float) and name.is_integer():
        name = int(name)
    if isinstance(name, bool) or not isinstance(name, int | str) or name == "":
        raise ConfigError(
            f"{row.where}: {field_name!r} is {name!r}; a task's name is text or a number"
        )
    _check_text(str(name), row)
    if not is_name(str(name)) or len(str(name)) > MAX_ROW_NAME:
        raise ConfigError(
            f"{row.where}: {field_name!r} is {_short(str(name))}; a task's name is 1 to "
            f'{MAX_ROW_NAME} of {NAME_CHARACTERS}: rename it, or set task_id_field to "", which '
            "names tasks by their position"
        )
    return str(name)


def _short(name: str) -> str:
    return repr(name) if len(name) <= MAX_ROW_NAME else f"{name[:40]!r}… ({len(name)} characters)"


def _payload(row: Row, fields: RowFields) -> Mapping[str, Any]:
    if fields.payload:
        return {name: filled(text, row) for name, text in fields.payload.items()}
    name = fields.payload_field
    if not name or _is_flat(row, fields):
        return row.values
    payload = row.values.get(name)
    if isinstance(payload, str):  # as tables have objects
        payload = _object(payload)
    if not isinstance(payload, Mapping):
        cure = (
            'name the field that holds it with payload_field, set that to "" for the whole row, or '
            "describe it with payload"
        )
        raise ConfigError(f"{row.where} has no object {name!r} for the agent: {cure}")
    return payload


def _is_flat(row: Row, fields: RowFields) -> bool:
    """Whether the row itself is the payload, such as {"question": …, "answer": …}."""
    if fields.payload_field != _PAYLOAD or _PAYLOAD in row.values:
        return False
    objects = [name for name, value in row.values.items() if isinstance(value, Mapping)]
    if near := difflib.get_close_matches(_PAYLOAD, objects, n=1, cutoff=0.75):
        raise ConfigError(f"{row.where} has {near[0]!r}: did you mean {_PAYLOAD!r}?")
    return any(name != fields.task_id_field for name in row.values)


def _object(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json(payload: Mapping[str, Any], row: Row) -> str:
    try:
        text = json.dumps(dict(payload), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        cure = "use text, finite numbers, true, false, null, lists and objects"
        raise ConfigError(f"{row.where} cannot be written as JSON ({error}): {cure}") from error
    _check_text(text, row)
    if (size := len(text.encode())) > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"{row.where}: the payload has {size:,} bytes as JSON, and {MAX_PAYLOAD_BYTES:,} is "
            "the most: shorten it, or give the name of a file that the agent reads"
        )
    return text


def _check_text(text: str, row: Row) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{row.where} has half a character (unpaired surrogate {text[error.start]!a}): write "
            "text in UTF-8"
        ) from error


def filled(template: str, row: Row) -> Any:
    """The template with the row's fields; one that is a field alone keeps the value's type.

    Raises:
        ConfigError: the row lacks a field or has null there, or the template is no template.
    """
    try:
        parts = list(Formatter().parse(template))
        alone = _field_alone(parts)
        if alone is not None:
            return _Fields(template, row).get_field(alone, (), row.values)[0]
        return _Fields(template, row).vformat(template, (), row.values)
    except (KeyError, TypeError) as error:
        shown = ", ".join(sorted(map(str, row.values)))
        raise ConfigError(
            f"{row.where} has no field {error}, which payload names in {template!r}: it has "
            f"{shown}; braces that are meant as such are written twice"
        ) from error
    except (ValueError, IndexError, AttributeError) as error:
        cure = 'write fields as "{name}", and other braces twice'
        raise ConfigError(f"payload has the template {template!r}: {error}; {cure}") from error


def _field_alone(parts: list[tuple[str, str | None, str | None, str | None]]) -> str | None:
    if len(parts) != 1:
        return None
    literal, name, form, conversion = parts[0]
    return None if literal or form or conversion or not name else name


class _Fields(Formatter):
    """Formats fields of a row; no attributes, and no null."""

    def __init__(self, template: str, row: Row) -> None:
        self._template, self._row = template, row

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The value at "a[b][c]"."""
        if "." in field_name.partition("[")[0]:
            raise AttributeError(f"{field_name!r} has a dot")
        value, used = super().get_field(field_name, args, kwargs)
        if value is None:
            raise ConfigError(
                f"{self._row.where} has null as {field_name!r}, which payload names in "
                f"{self._template!r}: give a value, or take the row out"
            )
        return value, used

    def format_field(self, value: Any, format_spec: str) -> str:
        """As JSON where it is no text or number."""
        if isinstance(value, list | dict | bool) and not format_spec:
            return json.dumps(value, ensure_ascii=False)
        return str(super().format_field(value, format_spec))
