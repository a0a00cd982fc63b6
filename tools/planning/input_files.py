"""Inputs of the planners, read from TOML files."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from scheduler.model.stage_profile import StageProfile
from services.chassis.config.sources import nearest
from services.chassis.errors import ConfigError
from tools.planning.dataflow import Dataflow, Role
from trainer.pipeline.fused_schedule.problem import Pipeline

Record = TypeVar("Record")

_STAGES = ("generation", "training")
_PIPELINE = {"stages", "micro_batches", "forward_seconds", "backward_seconds", "activation_bytes"}


def read_profiles(path: Path) -> tuple[StageProfile, StageProfile]:
    """The profiles of generation and training: `[generation]` and `[training]`, nodes = seconds.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    tables = _read(path)
    for name in tables.keys() - set(_STAGES):
        raise ConfigError(f"{path}: {name}: unknown key, give [generation] and [training]")
    profiles = []
    for name in _STAGES:
        with _named(f"{path}: [{name}]"):
            profiles.append(_profile(tables.get(name)))
    generation, training = profiles
    return generation, training


def read_dataflow(path: Path) -> Dataflow:
    """The roles: a table for each tag, with `seconds` by nodes and any other field of `Role`.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    roles = []
    for tag, table in _read(path).items():
        with _named(f"{path}: [{tag}]"):
            roles.append(_role(tag, table))
    with _named(str(path)):
        return Dataflow(roles=tuple(roles))


def read_pipelines(path: Path) -> tuple[Pipeline, Pipeline | None]:
    """The pipelines `[actor]` and, if given, `[critic]`; a number of seconds is that of each stage.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    tables = _read(path)
    for name in tables.keys() - {"actor", "critic"}:
        raise ConfigError(f"{path}: {name}: unknown key, give [actor] and [critic]")
    found = []
    for name in ("actor", "critic"):
        with _named(f"{path}: [{name}]"):
            found.append(_pipeline(tables[name]) if name in tables else None)
    actor, critic = found
    if actor is None:
        raise ConfigError(f"{path}: [actor] is missing")
    return actor, critic


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not text in UTF-8: {error}") from error


def _read(path: Path) -> Mapping[str, Any]:
    text = _text(path)
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


@contextmanager
def _named(place: str) -> Iterator[None]:
    """A complaint within names `place`."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error


def _record(kind: type[Record], values: Mapping[str, Any]) -> Record:
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in values.keys() - set(known):
        raise ValueError(f"{key}: unknown key{nearest(key, known)}")
    return _valid(kind, values)


def _valid(kind: type[Record], value: object) -> Record:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{name}: {message}" if name else message) from error


def _role(tag: str, table: object) -> Role:
    if not isinstance(table, dict):
        raise ValueError(f"{table!r} is no table: give the role's seconds and costs")  # noqa: TRY004
    for key in ("tag", "profile") & table.keys():
        raise ValueError(f"{key}: unknown key, the tag is the table's name, its profile `seconds`")
    profile = _profile(table.get("seconds"))
    points = {"nodes": list(profile.nodes), "stage_seconds": list(profile.stage_seconds)}
    costs = {key: value for key, value in table.items() if key != "seconds"}
    return _record(Role, {"tag": tag, "profile": points} | costs)


def _pipeline(table: object) -> Pipeline:
    if not isinstance(table, dict):
        raise ValueError(f"{table!r} is no table: give stages, micro_batches and seconds")  # noqa: TRY004
    for key in table.keys() - _PIPELINE:
        raise ValueError(f"{key}: unknown key{nearest(key, _PIPELINE)}")
    for key in _PIPELINE - table.keys():
        raise ValueError(f"{key} is missing")
    stages = _valid(int, table["stages"])
    return Pipeline(
        nodes=tuple(range(stages)),
        num_micro_batches=_valid(int, table["micro_batches"]),
        forward=_of_stages(table["forward_seconds"], stages),
        backward=_of_stages(table["backward_seconds"], stages),
        activation_bytes=_valid(float, table["activation_bytes"]),
    )


def _of_stages(seconds: object, stages: int) -> tuple[float, ...]:
    if isinstance(seconds, list):
        return tuple(_valid(float, each) for each in seconds)
    return (_valid(float, seconds),) * stages


def _profile(table: object) -> StageProfile:
    if not isinstance(table, dict):
        raise ValueError("seconds by number of nodes are not set: give 8 = 310.0 and others")  # noqa: TRY004
    return StageProfile.of(
        {_count(nodes): _valid(float, seconds) for nodes, seconds in table.items()}
    )


def _table(table: object) -> Mapping[str, object]:
    if not isinstance(table, dict):
        raise ValueError("seconds by batch size are not set: give 8 = 0.0085 and others")  # noqa: TRY004
    return table


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no number of nodes, give a whole number")
    return int(text)
