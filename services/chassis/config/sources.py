"""Where settings come from: a table of a TOML file, environment variables, command-line flags."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliUnknownArgs,
    EnvSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from services.chassis.config.settings import ServerConfig, secret_names
from services.chassis.errors import ConfigError, UsageError
from services.chassis.version import version

_MAX_FILE_BYTES = 4 << 20
_UNKNOWN = "unknown_arguments"
_DELIMITER = "__"
# What Kubernetes and Docker add for each service: …_SERVICE_HOST, …_PORT_8080_TCP_ADDR
_SERVICE_LINK = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_ADDR|_PORT|_PROTO)?)$"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")  # the value of …_PORT


@dataclass(frozen=True, slots=True)
class Source:
    """What one source sets: nested values by name, and the origin of each by its path."""

    values: Mapping[str, Any]
    """As given, not yet validated."""
    origins: Mapping[tuple[str, ...], str]
    """Of each value, for people: a place in a file, a variable, a flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A parsed command line."""

    source: Source
    config: Path | None
    print_config: bool
    check_config: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


class _Environment(EnvSettingsSource):
    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """JSON, or a comma-separated list."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return [part.strip() for part in value.split(",") if part.strip()]


def command_line(
    config_class: type[ServerConfig], table: str, argv: Sequence[str], program: str
) -> CommandLine:
    """Parse `argv` of `program`; settings of nested tables are dotted: --optimizer.learning-rate.

    Raises:
        UsageError: an unknown flag, with its nearest neighbour, or one without its value.
        SystemExit: code 0 after --help or --version.
    """
    argv = [_as_switch(config_class, argument) for argument in argv]
    parser = _parser(config_class, table, program)
    given = _flags(_loaded_class(config_class, table), parser, argv)
    options = [option for action in parser._actions for option in action.option_strings]
    passed_on = _passed_on(config_class, given.pop(_UNKNOWN, []), options)
    for name in passed_on.keys() & given.keys():
        raise ConfigError(f"{_flag((name,))} and its flags one by one: give one of them")
    own, _ = parser.parse_known_args(list(argv))
    return CommandLine(
        source=_source({**given, **passed_on}, _flag),
        config=own.config,
        print_config=own.print_config,
        check_config=own.check_config,
    )


def environment(config_class: type[ServerConfig], table: str) -> Source:
    """Variables SEAMFLOW_<TABLE>_<NAME>; nested: SEAMFLOW_TRAINER_OPTIMIZER__LEARNING_RATE.

    A variable with the table's prefix that names no setting is ignored, with a warning on stderr;
    one that Kubernetes or Docker adds for a service of that name is ignored without.

    Raises:
        ConfigError: text that is no value.
    """
    loaded = _loaded_class(config_class, table)
    source = _Environment(loaded)
    ignored = _ignored_variables(loaded, table)
    source.env_vars = {k: v for k, v in source.env_vars.items() if k.upper() not in ignored}
    try:
        values = source()
    except SettingsError as error:
        raise ConfigError(f"environment: {error}") from error
    return _source(values, lambda path: f"{_prefix(table)}{_DELIMITER.join(path)}".upper())


def toml_table(path: Path | None, table: str, tables: Iterable[str]) -> Source:
    """The table `table` of a file that other processes' `tables` may share.

    Raises:
        ConfigError: the file cannot be read, or holds an unknown table.
    """
    if path is None:
        return Source({}, {})
    document = read_toml(path)
    for name in document.keys() - {*tables, table}:
        raise ConfigError(f"{path}: unknown table [{name}]{nearest(name, [*tables, table])}")

    def origin(keys: tuple[str, ...]) -> str:
        return f"{path} [{'.'.join((table, *keys[:-1]))}] {keys[-1]}"

    return _source(document.get(table, {}), origin)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name most like an unknown one; "" if none is."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


@cache
def _loaded_class(config_class: type[ServerConfig], table: str) -> type[BaseSettings]:
    """The settings as pydantic-settings reads them: a secret can also come from a file."""
    fields: dict[str, Any] = {
        f"{name}_file": (Path | None, Field(None, description=f"File that holds {name}."))
        for name in secret_names(config_class)
    }
    fields[_UNKNOWN] = (CliUnknownArgs, Field(default=[]))
    base: type[Any] = type(config_class.__name__, (config_class, BaseSettings), {})
    loaded: Any = create_model(base.__name__, __base__=base, __doc__=config_class.__doc__, **fields)
    loaded.model_config |= SettingsConfigDict(
        env_prefix=_prefix(table), env_nested_delimiter=_DELIMITER
    )
    return cast("type[BaseSettings]", loaded)


def _flags(
    loaded: type[BaseSettings], parser: argparse.ArgumentParser, argv: Sequence[str]
) -> dict[str, Any]:
    try:
        return CliSettingsSource[Any](
            loaded,
            root_parser=parser,
            cli_prog_name=parser.prog,
            cli_parse_args=list(argv),
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_ignore_unknown_args=True,
            cli_avoid_json=True,
            cli_hide_none_type=True,
        )()
    except ValueError as error:  # a list or table that is neither JSON nor a comma-separated list
        raise UsageError(f"{error}; give lists of tables, and tables, as JSON") from error


def _as_switch(config_class: type[BaseModel], argument: str) -> str:
    """`--name=true` as `--name`, `--name=false` as `--no-name`, if the setting is true or false."""
    flag, _, value = argument.partition("=")
    if not flag.startswith("--") or value.lower() not in ("true", "false"):
        return argument
    *tables, name = flag.removeprefix("--").replace("-", "_").split(".")
    for table in tables:
        of_table = config_class.model_fields.get(table)
        kind = None if of_table is None else of_table.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return argument
        config_class = kind
    field = config_class.model_fields.get(name)
    if field is None or field.annotation not in (bool, bool | None):
        return argument
    return flag if value.lower() == "true" else f"--no-{flag.removeprefix('--')}"


def _parser(config_class: type[ServerConfig], table: str, program: str) -> argparse.ArgumentParser:
    summary = (config_class.__doc__ or "").partition("\n")[0]
    parser = _Parser(prog=program, description=summary, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{program} {version()}")
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"TOML file, table [{table}]")
    parser.add_argument("--print-config", action="store_true", help="print it, redacted, and exit")
    parser.add_argument("--check-config", action="store_true", help="check it and exit")
    return parser


def _passed_on(
    config_class: type[ServerConfig], unknown: Sequence[str], options: Sequence[str]
) -> dict[str, list[str]]:
    """Flags --PREFIX-FLAG with their values, as --FLAG, for the field with that "flags" prefix.

    Raises:
        UsageError: another unknown flag.
    """
    prefixes = {
        f"--{extra['flags']}-": name
        for name, field in config_class.model_fields.items()
        if isinstance(extra := field.json_schema_extra, dict) and "flags" in extra
    }
    passed_on: dict[str, list[str]] = {}
    taken: list[str] | None = None
    for argument in unknown:
        prefix = next((prefix for prefix in prefixes if argument.startswith(prefix)), "")
        if argument.startswith("--"):
            taken = passed_on.setdefault(prefixes[prefix], []) if prefix else None
        if taken is None:
            hint = nearest(argument.partition("=")[0], options) or "; see --help"
            raise UsageError(f"unknown argument {argument}{hint}")
        taken.append(f"--{argument.removeprefix(prefix)}" if prefix else argument)
    return passed_on


def _ignored_variables(loaded: type[BaseModel], table: str) -> set[str]:
    """Variables with the table's prefix that set nothing; warns of those somebody meant to set."""
    prefix = _prefix(table)
    known = {f"{prefix}{_DELIMITER.join(path)}".upper() for path in _paths(loaded)}
    ours = {k.upper(): v for k, v in sorted(os.environ.items()) if k.upper().startswith(prefix)}
    links = {name for name, value in ours.items() if _is_service_link(name, value, known)}
    unknown = [name for name in ours.keys() - links - known if not _is_nested(name, known)]
    for name in sorted(unknown):
        hint = nearest(name, known)
        sys.stderr.write(f"{table}: warning: {name} names no setting and is ignored{hint}\n")
    return {*links, *unknown}


def _is_service_link(name: str, value: str, known: Container[str]) -> bool:
    if name.endswith("_PORT") and _SERVICE_URL.match(value):
        return True
    return name not in known and _SERVICE_LINK.search(name) is not None


def _is_nested(name: str, known: Iterable[str]) -> bool:
    """Whether a variable sets one entry of a setting that is a table."""
    return any(name.startswith(f"{each}{_DELIMITER}") for each in known)


def _paths(settings: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    for name, field in settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from ((name, *rest) for rest in _paths(field.annotation))
        elif name != _UNKNOWN:
            yield (name,)


def _source(values: Mapping[str, Any], origin: Any) -> Source:
    return Source(values, {path: origin(path) for path in _leaves(values)})


def _leaves(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name)


def _flag(path: tuple[str, ...]) -> str:
    return f"--{'.'.join(path).replace('_', '-')}"


def _prefix(table: str) -> str:
    return f"SEAMFLOW_{table.upper()}_"


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a configuration file.

    Raises:
        ConfigError: it cannot be read, is no regular file, has more than 4 MiB, or is no TOML.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"--config {path}: is no regular file; name a TOML file")
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(f"--config {path}: has more than {_MAX_FILE_BYTES >> 20} MiB")
        return tomllib.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"--config {path}: is nested too deeply") from error
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise ConfigError(f"--config {path}: {error}") from error
