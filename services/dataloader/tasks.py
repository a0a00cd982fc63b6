"""Conversion of a row to a task message."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from seamflow.common.v1.tokens_pb2 import PURPOSE_EVAL, PURPOSE_TRAIN
from seamflow.trajectory.v1.trajectory_pb2 import Task

from services.chassis.errors import ConfigError
from services.dataloader.config import DataloaderConfig
from services.dataloader.sources import Row

__all__ = ["make_task"]

_FIELD_ALONE = re.compile(r"\{(?P<name>[^{}.!:\[\]]+)\}")
_PURPOSES = {"train": PURPOSE_TRAIN, "eval": PURPOSE_EVAL}


def make_task(row: Row, epoch: int, config: DataloaderConfig) -> Task:
    """The task of `row`: its id is the row's with the epoch, its payload an object.

    Raises:
        ConfigError: the row has no id, or is not JSON serializable; names the row and the cure.
    """
    return Task(
        task_id=f"{_name(row, config.task_id_field)}@{epoch}",
        payload_json=_json(_payload(row, config), row),
        num_samples=config.num_samples,
        purpose=_PURPOSES[config.purpose],
    )


def _name(row: Row, field: str) -> str:
    if not field:
        return str(row.index)
    name: Any = row.values.get(field)
    if isinstance(name, int) and not isinstance(name, bool):
        return str(name)
    if isinstance(name, str) and name:
        return name
    if field in row.values:
        raise ConfigError(f"{row.where}: {field!r} is {name!r}; a task's name is text or a number")
    cure = 'add it, or set task_id_field to the field that names the task, or to "" for positions'
    raise ConfigError(f"{row.where} has no {field!r}: {cure}")


def _payload(row: Row, config: DataloaderConfig) -> Mapping[str, Any]:
    if config.payload:
        return {name: _filled(text, row) for name, text in config.payload.items()}
    field = config.payload_field
    payload = row.values.get(field) if field else row.values
    if not isinstance(payload, Mapping):
        cure = (
            'name the field that holds it with payload_field, set that to "" for the whole row, or '
            "describe it with payload"
        )
        raise ConfigError(f"{row.where} has no object {field!r} for the agent: {cure}")
    return payload


def _filled(template: str, row: Row) -> Any:
    """The template with the row's fields; one that is a field alone keeps the value's type."""
    alone = _FIELD_ALONE.fullmatch(template)
    try:
        return row.values[alone["name"]] if alone else template.format_map(row.values)
    except KeyError as error:
        fields = ", ".join(sorted(row.values))
        raise ConfigError(
            f"{row.where} has no field {error}, which payload names in {template!r}: it has "
            f"{fields}; braces that are meant as such are written twice"
        ) from error
    except (ValueError, IndexError, AttributeError) as error:
        cure = 'write fields as "{name}", and other braces twice'
        raise ConfigError(f"payload has the template {template!r}: {error}; {cure}") from error


def _json(payload: Mapping[str, Any], row: Row) -> str:
    try:
        return json.dumps(dict(payload), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        cure = "use text, numbers, true, false, null, lists and objects"
        raise ConfigError(f"{row.where} cannot be written as JSON ({error}): {cure}") from error
