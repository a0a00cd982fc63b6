"""A field of a payload as a template over the fields of a row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from string import Formatter
from typing import Any

from services.chassis.errors import ConfigError
from services.lib.tasks.sources.base import Row


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
