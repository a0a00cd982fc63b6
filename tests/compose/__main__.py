"""`make test-compose`: build the images, train in containers, restart each of them, take all down.

Where no registry of images answers, the base image is made of Debian's packages; where no engine
runs, one is started, with its images in --data-root (kept, so that the next run builds less).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from bench.provenance import ROOT
from bench.report import Report
from deploy import containers
from tests.compose.base_images import base_images
from tests.compose.engine import EngineUnavailableError, engine

__all__ = ["main"]

STEPS_BEFORE = 10
STEPS_AFTER_RESTART = 2
_WAIT_SECONDS = 600.0
_CONTROL_SECONDS = 20.0
_POLL_SECONDS = 1.0
_JOBS = {"secrets", "prepare", "create-run"}
_COUNT = "import pathlib; print(len(pathlib.Path('/data/metrics.jsonl').read_bytes().splitlines()))"
_console = Console()


def main() -> int:
    """Run it all; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path, default=Path("/var/tmp/seamflow-test-compose"))
    given = parser.parse_args()
    try:
        with engine(given.data_root) as is_own:
            figures = {"engine_started": float(is_own), **_drill(given.data_root)}
    except EngineUnavailableError as error:
        sys.stderr.write(f"test-compose: {error}\n")
        return 69
    Report(bench="compose", figures=figures, packages=("seamflow",)).publish()
    return 0


def _drill(folder: Path) -> dict[str, float]:
    os.environ.update({**base_images(folder), "NUM_STEPS": "100000"})
    containers.compose("down", "--volumes", "--remove-orphans")
    try:
        return {**_started(), **_host_agent(), **_restarted(), **_control()}
    finally:
        containers.compose("down", "--volumes", "--remove-orphans")
        left = containers.containers()
        assert not left, f"left behind: {left}"


def _started() -> dict[str, float]:
    """From nothing to ten optimizer steps."""
    with _timed() as build:
        containers.compose("build", "--quiet")
    with _timed() as start:
        containers.up()
    with _timed() as train:
        _wait_for("10 optimizer steps", lambda: steps() >= STEPS_BEFORE)
    return {
        "containers": float(len(containers.containers())),
        "seconds_to_build": build(),
        "seconds_to_ready": start(),
        "seconds_of_prepare": _seconds_of("prepare"),
        "seconds_to_10_steps": start() + train(),
    }


def _host_agent() -> dict[str, float]:
    """An agent on this machine, with the credential that `up` has written."""
    folder = str(containers.AGENT_FOLDER)
    command = [sys.executable, "examples/minimal_agent.py", "127.0.0.1:50052", "quickstart", folder]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    return {"host_agent_rollouts": 1.0}


def _restarted() -> dict[str, float]:
    """Restart each container in turn: training goes on after each."""
    names = [each.service for each in containers.containers() if each.service not in _JOBS]
    figures: dict[str, float] = {"containers_restarted": float(len(names))}
    for name in names:
        wanted = steps() + STEPS_AFTER_RESTART
        containers.compose("restart", name)
        with _timed() as seconds:
            _wait_for(f"steps after the restart of {name}", partial(_goes_on, wanted))
        _console.print(
            f"{name}: {STEPS_AFTER_RESTART} steps and all healthy after {seconds():.0f} s"
        )
        figures[f"seconds_after_restart_of_{name}"] = seconds()
    return {**figures, "steps_trained": float(steps())}


def _goes_on(wanted: int) -> bool:
    return all(each.is_ready for each in containers.containers()) and steps() >= wanted


def _control() -> dict[str, float]:
    """Without the trajectory manager nothing is trained, which the same count must show."""
    containers.compose("stop", "trajectory-manager")
    time.sleep(5.0)  # a step in flight
    before = steps()
    time.sleep(_CONTROL_SECONDS)
    return {"control_steps_without_manager": float(steps() - before)}


def steps() -> int:
    """Optimizer steps so far; 0 while the trainer cannot be asked."""
    try:
        return int(
            containers.compose("exec", "-T", "trainer", "python", "-c", _COUNT, capture=True)
        )
    except (subprocess.CalledProcessError, ValueError):
        return 0


def _seconds_of(job: str) -> float:
    label = f"label=com.docker.compose.service={job}"
    names = subprocess.check_output(["docker", "ps", "-aq", "--filter", label], text=True).split()
    form = "{{.State.StartedAt}} {{.State.FinishedAt}}"
    text = subprocess.check_output(["docker", "inspect", "--format", form, *names], text=True)
    start, end = (datetime.fromisoformat(each[:26].rstrip("Z")) for each in text.split())
    return (end - start).total_seconds()


def _wait_for(what: str, is_done: Callable[[], bool]) -> None:
    limit = time.monotonic() + _WAIT_SECONDS
    with _console.status(f"waiting for {what}"):
        while not is_done():
            if time.monotonic() > limit:
                raise TimeoutError(f"{what}: not within {_WAIT_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    start = time.monotonic()
    end: list[float] = []
    yield lambda: (end[0] if end else time.monotonic()) - start
    end.append(time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
