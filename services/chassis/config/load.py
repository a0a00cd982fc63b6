"""Typed configuration: default < TOML file < environment < flag. Nothing unknown passes.

A config class is a frozen dataclass derived from `ServerConfig`. Its field `max_staleness` in the
table `trainer` is set by `max_staleness` under `[trainer]` in the file given with `--config`, by
`SEAMFLOW_TRAINER_MAX_STALENESS`, or by `--max-staleness`. A field with `metadata={"secret": True}`
is never printed and can also be read from a mounted file: `..._FILE`, `--...-file`. A field may
also be a tuple, or a mapping by name, of frozen dataclasses: tables within the table.
"""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from services.chassis.config import flags
from services.chassis.config.values import describe, from_text, from_toml, is_structured
from services.chassis.errors import ConfigError, ExitCode, StartupError, UsageError

__all__ = ["ConfigError", "ServerConfig", "UsageError", "load", "load_or_exit", "redacted"]

ConfigType = TypeVar("ConfigType", bound="ServerConfig")

TABLES = (
    "trajectory_manager",
    "rollout_gateway",
    "rollout_server",
    "scheduler",
    "node_agent",
    "trainer",
    "weights",
    "dataloader",
    "ranker",
    "scoring",
    "agent_runner",
    "launcher",
)
# Variables that belong to no table: the event loop, and where a launcher reads the bound port.
_OTHER_VARIABLES = frozenset({"SEAMFLOW_UVLOOP", "SEAMFLOW_PORT_FILE"})
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class Secret(str):
    """A string that does not show itself when the config that holds it is printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What every process can be told."""

    instance: str = "0"
    """Name of this replica in logs."""
    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback TLS and a token are required."""
    port: int = 0
    """gRPC port; 0 takes a free one."""
    admin_port: int = 0
    """HTTP port of /healthz, /readyz, /metrics and /version; 0 takes a free one, -1 has none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""
    log_format: Literal["json", "console"] = "json"
    """JSON lines for machines, or coloured lines for people."""
    drain_seconds: float = 10.0
    """Seconds that calls in flight get to finish after SIGTERM."""
    development: bool = False
    """Serve reflection, and allow plaintext beyond loopback."""
    token: str | None = field(default=None, metadata={"secret": True})
    """Bearer token that callers must show, and that is shown to peers."""
    tls_ca_file: Path | None = None
    """PEM file of the authority that signed the certificates of callers and peers."""
    tls_cert_file: Path | None = None
    """PEM file of this process's certificate chain."""
    tls_key_file: Path | None = None
    """PEM file of this process's private key."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """A value somebody gave, and where."""

    value: Any
    origin: str


Settings = dict[str, _Setting]


def load(
    config_class: type[ConfigType], table: str, argv: Sequence[str] | None = None
) -> ConfigType:
    """Read the configuration of `table`; `argv` is the command line, sys.argv if None.

    Raises:
        UsageError: an unknown flag, or one without its value.
        ConfigError: an unknown key or variable, a wrong value, a required field not set.
        SystemExit: code 0 after --help, --version, --print-config or --check-config.
    """
    given = flags.parse(config_class, table, sys.argv[1:] if argv is None else argv)
    settings = {
        **_from_file(config_class, table, given.config),
        **_from_environment(config_class, table, os.environ),
        **_from_flags(config_class, given),
    }
    config = _build(config_class, table, settings)
    _check_transport(config)
    if given.print_config:
        print("\n".join(_lines(config, table, settings)))
    if given.print_config or given.check_config:
        raise SystemExit(ExitCode.CLEAN)
    return config


def load_or_exit(
    config_class: type[ConfigType], table: str, argv: Sequence[str] | None = None
) -> ConfigType:
    """`load`, but a mistake is one line on stderr and the exit code that belongs to it."""
    try:
        return load(config_class, table, argv)
    except StartupError as error:
        print(f"{table}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


def redacted(config: ServerConfig) -> dict[str, Any]:
    """The fields of `config` by name, with "***" for every secret that is set."""
    return {
        entry.name: "***" if _is_secret(entry) and value is not None else value
        for entry in fields(config)
        for value in [getattr(config, entry.name)]
    }


def _from_file(config_class: type[ServerConfig], table: str, path: Path | None) -> Settings:
    if path is None:
        return {}
    document = _read_toml(path)
    tables = sorted({*TABLES, table})
    for name in document:
        if name not in tables:
            raise ConfigError(f"{path}: unknown table [{name}]{_nearest(name, tables)}")
    names, given = _names(config_class), document.get(table, {})
    for key in given:
        if key not in names:
            raise ConfigError(f"{path} [{table}] {key}: unknown key{_nearest(key, names)}")
    origins = {key: f"{path} [{table}] {key}" for key in given}
    return _settings(config_class, given, origins, text=False)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error


def _from_environment(
    config_class: type[ServerConfig], table: str, environ: Mapping[str, str]
) -> Settings:
    prefix = f"SEAMFLOW_{table.upper()}_"
    ours = {f"{prefix}{name.upper()}": name for name in _names(config_class)}
    foreign = tuple(f"SEAMFLOW_{other.upper()}_" for other in TABLES if other != table)
    given, origins = {}, {}
    for variable in sorted(name for name in environ if name.startswith("SEAMFLOW_")):
        if variable in _OTHER_VARIABLES or variable.startswith(foreign):
            continue
        if variable not in ours:
            known = {*ours, *_OTHER_VARIABLES, *_shared_variables()}
            raise ConfigError(f"unknown variable {variable}{_nearest(variable, known)}")
        given[ours[variable]], origins[ours[variable]] = environ[variable], variable
    return _settings(config_class, given, origins, text=True)


def _from_flags(config_class: type[ServerConfig], given: flags.Flags) -> Settings:
    origins = {name: f"--{name.replace('_', '-')}" for name in (*given.values, *given.passed_on)}
    for name in given.values.keys() & given.passed_on.keys():
        raise ConfigError(f"{origins[name]} and its flags one by one: give one of them")
    return {
        **_settings(config_class, given.values, origins, text=True),
        **_settings(config_class, given.passed_on, origins, text=False),
    }


def _settings(
    config_class: type[ServerConfig],
    given: Mapping[str, Any],
    origins: Mapping[str, str],
    *,
    text: bool,
) -> Settings:
    """What one source sets, by field name; a secret and its `_file` together are a mistake."""
    settings: Settings = {}
    for key, value in given.items():
        name, setting = _setting(config_class, key, value, origins[key], text=text)
        if name in settings:
            raise ConfigError(f"{settings[name].origin} and {setting.origin}: give one of them")
        settings[name] = setting
    return settings


def _setting(
    config_class: type[ServerConfig], key: str, value: Any, origin: str, *, text: bool
) -> tuple[str, _Setting]:
    """The field that `key` sets and its value; `<secret>_file` reads the secret from that file."""
    known = _fields(config_class)
    if key not in known:
        return key.removesuffix("_file"), _Setting(_read_secret(value, origin), origin)
    wanted = typing.get_type_hints(config_class)[key]
    try:
        converted = from_text(value, wanted) if text else from_toml(value, wanted)
    except ValueError as error:
        shown = "it" if _is_secret(known[key]) else repr(value)
        why = str(error) if is_structured(wanted) else f"{shown} is not {describe(wanted)}"
        raise ConfigError(f"{origin}: {why}") from error
    secret = _is_secret(known[key]) and isinstance(converted, str)
    return key, _Setting(Secret(converted) if secret else converted, origin)


def _read_secret(path: object, origin: str) -> Secret:
    try:
        content = Path(str(path)).read_text().strip()
    except OSError as error:
        raise ConfigError(f"{origin}: {path}: {error.strerror}") from error
    if not content:
        raise ConfigError(f"{origin}: {path} is empty")
    return Secret(content)


def _build(
    config_class: type[ConfigType], table: str, settings: Mapping[str, _Setting]
) -> ConfigType:
    for name, entry in _fields(config_class).items():
        required = entry.default is MISSING and entry.default_factory is MISSING
        if required and name not in settings:
            variable = f"SEAMFLOW_{table.upper()}_{name.upper()}"
            raise ConfigError(
                f"{name} is not set: give --{name.replace('_', '-')}, {variable}, "
                f"or {name} under [{table}] in the file of --config"
            )
    try:
        return config_class(**{name: setting.value for name, setting in settings.items()})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_transport(config: ServerConfig) -> None:
    if (config.tls_cert_file is None) != (config.tls_key_file is None):
        raise ConfigError("tls_cert_file and tls_key_file are set together or not at all")
    for name in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
        path = getattr(config, name)
        if path is not None and not path.is_file():
            raise ConfigError(f"{name}: {path} does not exist")
    safe = config.tls_cert_file is not None and config.token is not None
    if config.host not in _LOOPBACK and not safe and not config.development:
        raise ConfigError(
            f"host {config.host} is reachable from other machines: set tls_cert_file, tls_key_file "
            "and token, or --development to accept plaintext"
        )


def _lines(config: ServerConfig, table: str, settings: Mapping[str, _Setting]) -> Iterable[str]:
    yield f"[{table}]"
    for name, value in redacted(config).items():
        origin = settings[name].origin if name in settings else "default"
        if value is None:
            yield f"# {name} is not set"
        else:
            yield f"{name} = {_toml(value)}  # {origin}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(part) for part in value)}]"
    if is_dataclass(value):
        named = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        return _toml({name: part for name, part in named.items() if part is not None})
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_toml(str(key))} = {_toml(part)}" for key, part in value.items())
        return f"{{{pairs}}}"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _fields(config_class: type[ServerConfig]) -> dict[str, Field[Any]]:
    return {entry.name: entry for entry in fields(config_class)}


def _names(config_class: type[ServerConfig]) -> list[str]:
    known = _fields(config_class)
    return [*known, *(f"{name}_file" for name, entry in known.items() if _is_secret(entry))]


def _shared_variables() -> Iterable[str]:
    for table in TABLES:
        for name in _names(ServerConfig):
            yield f"SEAMFLOW_{table}_{name}".upper()


def _is_secret(entry: Field[Any]) -> bool:
    return bool(entry.metadata.get("secret"))


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
