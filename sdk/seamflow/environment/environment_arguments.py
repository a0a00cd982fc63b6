"""Command line of an environment server: flags, then SEAMFLOW_ENVIRONMENT_*, then defaults."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seamflow import __version__
from seamflow.environment.environment_class import load_object, with_arguments
from seamflow.environment.environment_server import EnvironmentServerConfig, serve_until_signalled
from seamflow.processes.left_processes import ended_for_sure

_PREFIX = "SEAMFLOW_ENVIRONMENT_"
_USAGE, _UNAVAILABLE, _CONFIG = 64, 69, 78  # exit codes of sysexits.h


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        self.exit(_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments, load the class or function and serve it until a signal."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    values = vars(_parser().parse_args(argv))
    # `python -m` puts the current folder on the path, other ways of starting do not.
    sys.path.insert(0, str(Path.cwd()))
    names = {field: values.pop(field) for field in ("environment", "reward")}
    try:
        found = {f: load_object(name, f) if name else None for f, name in names.items()}
        environment = _with_arguments(found["environment"], values.pop("arguments"))
        config = EnvironmentServerConfig(**values)
        serving = serve_until_signalled(environment, config, reward=found["reward"])
        asyncio.run(ended_for_sure(serving))
    except ValueError as error:
        sys.stderr.write(f"seamflow environment: {error}\n")
        sys.exit(_CONFIG)
    except OSError as error:
        sys.stderr.write(f"seamflow environment: {error}\n")
        sys.exit(_UNAVAILABLE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m seamflow.environment",
        description="Serves an environment class or a reward function.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    defaults = EnvironmentServerConfig()
    for name, kind, default, text in (
        ("environment", str, None, "module:Class"),
        ("arguments", str, None, "JSON object of keyword arguments of the class"),
        ("reward", str, None, "module:function"),
        ("host", str, defaults.host, "address to listen on"),
        ("port", int, defaults.port, "port; 0 takes a free one"),
        ("max_episodes", int, None, "most episodes at once"),
        ("idle_seconds", float, defaults.idle_seconds, "idle episodes make room after this"),
        (
            "max_observation_bytes",
            int,
            defaults.max_observation_bytes,
            "most bytes of one answer's messages and info",
        ),
        ("token", str, None, "bearer token of callers"),
        ("tls_cert_file", Path, None, "PEM certificate chain"),
        ("tls_key_file", Path, None, "PEM private key"),
    ):
        given = _variable(name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=default if given is None else given, help=text)
    return parser


def _with_arguments(environment: Any, text: str | None) -> Any:
    """The class itself, or with --arguments a function that makes its objects with them."""
    if text is None:
        return environment
    cure = """give a JSON object of keyword arguments, such as '{"size": 3}'"""
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--arguments is {text!r}: {cure} ({error})") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"--arguments is {text!r}: {cure}")  # noqa: TRY004 -- a setting
    if environment is None:
        raise ValueError(f"--arguments is {text!r}, but no class takes them: give --environment")
    if not callable(environment):
        return environment  # refused by the server, with its cure
    return with_arguments(environment, arguments)


def _variable(name: str) -> str | None:
    """The variable, or the content of the file that its _FILE twin names."""
    file = os.environ.get(f"{_PREFIX}{name.upper()}_FILE")
    if file is not None and not name.endswith("_file"):
        return Path(file).read_text(encoding="utf-8-sig").strip()
    return os.environ.get(f"{_PREFIX}{name.upper()}")
