"""Command line of the agent runner: flags, then SEAMFLOW_AGENT_RUNNER_*, then defaults."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from seamflow import __version__
from seamflow.credentials import Credentials
from seamflow.processes.left_processes import ended_for_sure
from seamflow.runner.agent_runner import RunnerConfig, load_agent, run_until_signalled

_PREFIX = "SEAMFLOW_AGENT_RUNNER_"
_USAGE, _CONFIG = 64, 78  # exit codes of sysexits.h
_TYPES = {"int": int, "float": float}
_FILES = {
    "token_file": "token_file",
    "ca_file": "tls_ca_file",
    "cert_file": "tls_cert_file",
    "key_file": "tls_key_file",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        self.exit(_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments, load the agent and run it until a signal."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    values = vars(_parser().parse_args(argv))
    name = values.pop("agent")
    # `python -m` puts the current folder on the path, the console script does not.
    sys.path.insert(0, str(Path.cwd()))
    try:
        config = RunnerConfig(credentials=_credentials(values), **values)
        agent = load_agent(name)
    except ValueError as error:
        sys.stderr.write(f"seamflow runner: {error}\n")
        sys.exit(_CONFIG)
    asyncio.run(ended_for_sure(run_until_signalled(agent, config)))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="seamflow runner", description="Runs an agent on leased tasks.")
    parser.add_argument("--version", action="version", version=__version__)
    agent = _environment("agent")
    parser.add_argument("--agent", default=agent, required=agent is None, help="module:Class")
    for field in dataclasses.fields(RunnerConfig):
        if field.name == "credentials":
            continue
        given = _environment(field.name)
        required = field.default is dataclasses.MISSING and given is None
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=_TYPES.get(str(field.type), str),
            default=given if given is not None else field.default,
            required=required,
        )
    for name in ("token", *_FILES.values()):
        parser.add_argument(f"--{name.replace('_', '-')}", default=_environment(name))
    return parser


def _credentials(values: dict[str, str | None]) -> Credentials:
    """Take the flags of the credentials out of `values`."""
    files = {name: values.pop(flag) for name, flag in _FILES.items()}
    paths = {name: Path(file) if file else None for name, file in files.items()}
    return Credentials(token=values.pop("token"), **paths)


def _environment(name: str) -> str | None:
    return os.environ.get(f"{_PREFIX}{name.upper()}")
