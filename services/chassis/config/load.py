"""Load the settings of a process: default < TOML file < environment < flag.

The field `learning_rate` of the nested table `optimizer` of the process `trainer` is set by
`learning_rate` under `[trainer.optimizer]` in the file of `--config`, by
`SEAMFLOW_TRAINER_OPTIMIZER__LEARNING_RATE`, or by `--optimizer.learning-rate`. A secret can also be
read from a mounted file: `..._FILE`, `--...-file`. Only variables with the process's own prefix are
read; of those, the ones that name no setting are ignored with a warning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from services.chassis.config.settings import FileSecret, ServerConfig, secret_names
from services.chassis.config.sources import Source, command_line, environment, nearest, toml_table
from services.chassis.errors import ConfigError, ExitCode, StartupError, UsageError

__all__ = ["TABLES", "ConfigError", "UsageError", "load", "load_or_exit"]

ConfigType = TypeVar("ConfigType", bound="ServerConfig")

TABLES = (
    "trajectory_manager",
    "rollout_gateway",
    "http_gateway",
    "rollout_server",
    "scheduler",
    "node_agent",
    "trainer",
    "weights",
    "dataloader",
    "ranker",
    "evaluator",
    "scoring",
    "environments",
    "tool_loop",
    "console",
    "agent_runner",
    "launcher",
    "evaluation",
)
"""Top-level tables of a configuration file that all processes share."""

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def load(
    config_class: type[ConfigType],
    table: str,
    argv: Sequence[str] | None = None,
    program: str | None = None,
) -> ConfigType:
    """Read the settings of `table`; `argv` is the command line, sys.argv if None.

    `program` is its name in --help; None: that of the table.

    Raises:
        UsageError: an unknown flag, or one without its value.
        ConfigError: an unknown key, a wrong value, a required setting not given.
        SystemExit: code 0 after --help, --version, --print-config or --check-config.
    """
    arguments = sys.argv[1:] if argv is None else argv
    given = command_line(config_class, table, arguments, program or table)
    file = toml_table(given.config, table, TABLES)
    sources = (file, environment(config_class, table), given.source)
    merged = _merged(sources, secret_names(config_class))
    config = _validated(config_class, table, merged)
    _check_transport(config)
    if given.print_config:
        print("\n".join(_lines(config, (table,), merged.origins)))
    if given.print_config or given.check_config:
        raise SystemExit(ExitCode.CLEAN)
    return config


def load_or_exit(
    config_class: type[ConfigType],
    table: str,
    argv: Sequence[str] | None = None,
    program: str | None = None,
) -> ConfigType:
    """`load`, but a mistake is a message on stderr and the exit code that belongs to it."""
    with exiting(table):
        return load(config_class, table, argv, program)


@contextmanager
def exiting(program: str) -> Iterator[None]:
    """A `StartupError` in the block ends this process: a line on stderr, and its exit code."""
    try:
        yield
    except StartupError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


def _merged(sources: Iterable[Source], secrets: Iterable[str]) -> Source:
    """Later sources win, value by value; a secret's file is read."""
    values: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    for source in sources:
        values = _updated(values, _with_secrets(source, secrets))
        origins |= source.origins
        origins |= {
            (name,): source.origins[(f"{name}_file",)]
            for name in secrets
            if (f"{name}_file",) in source.origins
        }
    return Source(values, origins)


def _updated(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested `values` with nested `changes`."""
    both = {
        name: _updated(values[name], change)
        for name, change in changes.items()
        if isinstance(change, Mapping) and isinstance(values.get(name), Mapping)
    }
    return {**values, **changes, **both}


def _with_secrets(source: Source, secrets: Iterable[str]) -> dict[str, Any]:
    """The source's values, with each secret that it names by file read from there."""
    values = dict(source.values)
    for secret in secrets:
        if (path := values.pop(f"{secret}_file", None)) is None:
            continue
        origin = source.origins[(f"{secret}_file",)]
        if secret in values:
            raise ConfigError(f"{source.origins[(secret,)]} and {origin}: give one of them")
        values[secret] = _read_secret(Path(path), origin)
    return values


def _read_secret(path: Path, origin: str) -> FileSecret:
    try:
        return FileSecret(path)
    except OSError as error:
        raise ConfigError(f"{origin}: {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from error


def _validated(config_class: type[ConfigType], table: str, source: Source) -> ConfigType:
    try:
        return config_class.model_validate(source.values)
    except ValidationError as error:
        mistakes = (_explained(each, config_class, table, source) for each in error.errors())
        raise ConfigError("\n".join(mistakes)) from error


def _explained(
    error: ErrorDetails, config_class: type[BaseModel], table: str, source: Source
) -> str:
    """One mistake: where it was made, the setting, its value and the cure."""
    path = tuple(str(part) for part in error["loc"])
    name, origin = ".".join(path), source.origins.get(path)
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{name} is not set: {_ways(table, path)}"
    if error["type"] == "extra_forbidden":
        known = _names_beside(config_class, path)
        return f"{origin or name}: unknown key{nearest(path[-1], known)}"
    if not path:  # a validator of the whole: its message names the settings
        return message
    place = f"{origin}: " if origin else ""
    value = "***" if path[0] in secret_names(config_class) else repr(error["input"])
    return f"{place}{name} is {value}: {message[0].lower()}{message[1:]}"


def _ways(table: str, path: tuple[str, ...]) -> str:
    flag = ".".join(path).replace("_", "-")
    variable = f"SEAMFLOW_{table}_{'__'.join(path)}".upper()
    header = ".".join((table, *path[:-1]))
    return f"give --{flag}, {variable}, or {path[-1]} under [{header}] in the file of --config"


def _names_beside(settings: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    """The settings of the table that holds the last part of `path`."""
    for name in path[:-1]:
        field = settings.model_fields.get(name)
        if field is None or not isinstance(field.annotation, type):
            return []
        settings = field.annotation
    return list(getattr(settings, "model_fields", ()))


def _check_transport(config: ServerConfig) -> None:
    if (config.tls_cert_file is None) != (config.tls_key_file is None):
        raise ConfigError("tls_cert_file and tls_key_file are set together or not at all")
    for name in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
        path = getattr(config, name)
        if path is not None and not path.is_file():
            raise ConfigError(f"{name}: {path} does not exist")
    if config.certificate_identities and None in (config.tls_ca_file, config.tls_cert_file):
        raise ConfigError("certificate_identities needs tls_ca_file, tls_cert_file, tls_key_file")
    services = (config.token, config.service_tokens_folder, config.certificate_identities or None)
    safe = config.tls_cert_file is not None and services != (None, None, None)
    if config.host not in _LOOPBACK and not safe and not config.development:
        raise ConfigError(
            f"host {config.host} is reachable from other machines: set tls_cert_file, tls_key_file "
            "and one of token, service_tokens_folder and certificate_identities, or --development "
            "to accept plaintext"
        )


def _lines(
    settings: BaseModel, table: tuple[str, ...], origins: Mapping[tuple[str, ...], str]
) -> Iterator[str]:
    """The settings as TOML, each with its origin; nested tables last."""
    yield f"[{'.'.join(table)}]"
    nested = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            nested[name] = value
        elif value is None:
            yield f"# {name} is not set"
        else:
            yield f"{name} = {_toml(value)}  # {origins.get((*table[1:], name), 'default')}"
    for name, value in nested.items():
        yield from _lines(value, (*table, name), origins)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(part) for part in value)}]"
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_toml(str(key))} = {_toml(part)}" for key, part in value.items())
        return f"{{{pairs}}}"
    text = "***" if isinstance(value, SecretStr) else str(value)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
