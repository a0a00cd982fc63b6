"""The project of `seamflow init`, trained as users train it, and consoles that show its run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tools.provenance import ROOT

_LINK = re.compile(rb"console: (http://\S+)")
_STOP_SECONDS = 30.0
_EVALUATED = ("--set", "evaluation.every_steps=4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """A console that runs."""

    link: str
    """With the token that it printed."""
    process: subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """A run of the project, in progress or finished."""

    folder: Path
    """Of the run."""
    process: subprocess.Popen[bytes]
    log: Path
    """What the terminal showed."""

    def steps(self) -> list[int]:
        """Steps that were made."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def wait_for_step(self, step: int, seconds: float = 900.0) -> None:
        """Wait until a step was made.

        Raises:
            RuntimeError: the training ended before, or `seconds` have passed.
        """
        deadline = time.monotonic() + seconds
        while step not in self.steps():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no step {step}: {self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def processes(self, module: str) -> list[psutil.Process]:
        """Those of the run that are `python -m MODULE`."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in children if module in each.cmdline()]

    def link(self) -> str:
        """The link that the training printed."""
        return _printed_link(self.log, self.process)


@contextmanager
def training(folder: Path, steps: int, *flags: str) -> Iterator[TrainedRun]:
    """Make the project in `folder` and train it for `steps`; it is ended afterwards."""
    command = (sys.executable, "-m", "seamflow.cli.main")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}", "PYTHONUNBUFFERED": "1"}
    project = folder / "project"
    subprocess.run([*command, "init", str(project)], env=environment, check=True)
    log = folder / "terminal.log"
    with log.open("wb") as terminal:
        process = subprocess.Popen(
            [
                *(*command, "train", "--name", "trained"),
                *("--set", f"trainer.num_steps={steps}", *(flags or _EVALUATED)),
            ],
            cwd=project,
            env=environment,
            stdout=terminal,
            stderr=terminal,
        )
    try:
        yield TrainedRun(folder=project / "runs" / "trained", process=process, log=log)
    finally:
        _end(process)


@contextmanager
def console(folder: Path, *flags: str) -> Iterator[Console]:
    """`python -m services.console` with `flags`; its log is in `folder`."""
    log = folder / f"console-{len(list(folder.glob('console-*')))}.log"
    with log.open("wb") as terminal:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.console", *flags],
            env={**os.environ, "PYTHONPATH": f"{ROOT}", "PYTHONUNBUFFERED": "1"},
            stdout=terminal,
            stderr=terminal,
        )
    try:
        yield Console(link=_printed_link(log, process), process=process)
    finally:
        _end(process)


def _printed_link(log: Path, process: subprocess.Popen[bytes], seconds: float = 120.0) -> str:
    deadline = time.monotonic() + seconds
    while (found := _LINK.search(log.read_bytes())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no link of a console: {log.read_text()[-2000:]}")
        time.sleep(0.05)
    return found[1].decode()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
