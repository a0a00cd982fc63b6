"""What the suite is run against: an environment, its server process, and a scripted policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lib.redis_server import free_port

ROOT = Path(__file__).parents[4]
_START_SECONDS = 120.0

Server = subprocess.Popen[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One environment."""

    name: str
    """Of the adapter."""
    environment: str = ""
    """ "module:Class"."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    venv: str = ""
    """Folder in .venv-adapters; empty: this interpreter."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """Of all tasks, unless the environment has its own."""
    answers: tuple[str, ...] = ("1", "2", "3")
    """What the policy says, over and over."""
    max_steps: int = 6
    """Steps of an episode of the suite; then it is closed."""
    is_random: bool = True
    """Whether other seeds start other episodes."""
    bad_answers: tuple[str, ...] = ("", "nonsense \u2603", "[" * 200, "-1", "9" * 5000)
    """Answers that are no action, and earn nothing."""
    command: tuple[str, ...] = ()
    """Starts a server, --port N aside; empty: `python -m seamflow.environment`."""
    backend: Callable[[], AbstractContextManager[Mapping[str, Any]]] = lambda: nullcontext({})
    """What must run beside it; yields further arguments of the class."""
    missing: Callable[[], str] = lambda: ""
    """Why it cannot be run here, beside a missing venv; empty: it can."""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        if not self.venv:
            return Path(sys.executable)
        return ROOT / ".venv-adapters" / self.venv / "bin" / "python"

    def cannot_run(self) -> str:
        """Why not; empty: it can."""
        if not self.python.exists():
            return f"make .venv-adapters/{self.venv}"
        return self.missing()


@contextmanager
def serving(case: Case, port: int = 0, **flags: object) -> Iterator[tuple[str, Server]]:
    """Address and process of a server of `case`; killed at the end."""
    with case.backend() as extra:
        port = port or free_port()
        command = case.command or (str(case.python), "-m", "seamflow.environment")
        given = {**flags, "port": port}
        if not case.command:
            arguments = json.dumps({**case.arguments, **extra})
            given |= {"environment": case.environment, "arguments": arguments}
        options = [text for flag, value in given.items() for text in _flag(flag, value)]
        with started([*command, *options]) as process:
            yield f"127.0.0.1:{port}", process


def _flag(name: str, value: object) -> tuple[str, str]:
    return f"--{name.replace('_', '-')}", str(value)


@contextmanager
def started(command: list[str]) -> Iterator[Server]:
    """A process that has written its first line; killed at the end."""
    path = os.pathsep.join((str(ROOT / "sdk"), str(ROOT)))
    variables = {k: v for k, v in os.environ.items() if not k.startswith("SEAMFLOW_")}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**variables, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    impatience = threading.Timer(_START_SECONDS, process.kill)
    impatience.start()
    try:
        with process:
            try:
                line = process.stdout.readline()
                assert line, f"{command} ended with code {process.wait()}"
                # What it prints later must not block it.
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield process
            finally:
                process.kill()
    finally:
        impatience.cancel()
