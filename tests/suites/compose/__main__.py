"""`make test-compose`: build the images, train in containers, restart each of them, take all down.

Where no registry of images answers, the base image is made of Debian's packages; where no engine
runs, one is started, with its images in --data-root (kept, so that the next run builds less).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from seamflow.release import __version__

from bench.report import Report
from deploy import containers
from tests.suites.compose.base_images import base_images, exists
from tests.suites.compose.engine import EngineUnavailableError, engine
from tests.suites.compose.host_agent import is_trained, run_page
from tests.suites.compose.images import gigabytes
from tests.suites.compose.prepare_beside import prepare_beside
from tools.provenance import ROOT

STEPS_BEFORE = 10
STEPS_AFTER_RESTART = 2
_WAIT_SECONDS = 600.0
_CONTROL_SECONDS = 20.0
_POLL_SECONDS = 1.0
_JOBS = {"secrets", "prepare", "create-run"}
_PROFILES = ("scoring",)
_IMAGE = f"seamflow/local:{__version__}"
_COUNT = "import pathlib; print(len(pathlib.Path('/data/metrics.jsonl').read_bytes().splitlines()))"
_TRAINED = "print(open('/data/trained_samples.jsonl').read(), end='')"
_METRICS = (
    "import urllib.request; "
    "print(urllib.request.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
)
_BEST = (
    "import pathlib; best = pathlib.Path('/data/checkpoints/best/best.json'); "
    "print(best.read_text() if best.exists() else '', end='')"
)
_EVALUATED = "print(open('/data/evaluation/evaluation.jsonl').read(), end='')"
_ANY_MEAN = "-1.0"
"""A target that every reward reaches."""
_SCORED = re.compile(r"^seamflow_scoring_\w*samples_total\S* (\S+)$", re.MULTILINE)
_console = Console()


def main() -> int:
    """Run it all; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path, default=Path("/var/tmp/seamflow-test-compose"))
    parser.add_argument("--no-build", action="store_true", help="take the images that are there")
    given = parser.parse_args()
    try:
        with engine(given.data_root) as is_own:
            figures = _drill(given.data_root, not given.no_build)
            figures |= {"engine_started": float(is_own)}
    except EngineUnavailableError as error:
        sys.stderr.write(f"test-compose: {error}\n")
        return 69
    Report(bench="compose", figures=figures, packages=("seamflow",)).publish()
    return 0


def _drill(folder: Path, build: bool) -> dict[str, float]:
    with _timed() as base, base_images(folder) as images:
        os.environ.update({**images, "NUM_STEPS": "100000"})
        containers.down("--volumes")
        built = {"seconds_to_base_images": base(), **_built()} if build else {}
    try:
        started = _started()
        up = _summed(built, started) if built else {}
        _console.print({**built, **started, **up})
        figures = {**built, **started, **up, **_host_agents(), **_best(), **_restarted()}
        figures |= {**_control(), **_ended_early()}
    finally:
        containers.down("--volumes")
        left = containers.containers()
        assert not left, f"left behind: {left}"
    return {**figures, **prepare_beside()}


def _built() -> dict[str, float]:
    is_new = not exists(_IMAGE)
    with _timed() as build:
        containers.compose(*containers.chosen(_PROFILES), "build", "--quiet")
    return {
        "seconds_to_build": build(),
        "built_from_nothing": float(is_new),
        "gigabytes_of_images": gigabytes((_IMAGE, os.environ["REDIS_IMAGE"])),
    }


def _summed(built: dict[str, float], started: dict[str, float]) -> dict[str, float]:
    """What `make up` takes, with the base images there."""
    seconds = built["seconds_to_build"]
    return {
        "seconds_up_to_healthy": seconds + started["seconds_to_ready"],
        "seconds_up_to_step_10": seconds + started["seconds_to_10_steps"],
    }


def _started() -> dict[str, float]:
    """From nothing to ten optimizer steps, with every sample scored."""
    load, *_ = os.getloadavg()
    with _timed() as start:
        containers.up(_PROFILES, build=False)
    with _timed() as train:
        _wait_for("10 optimizer steps", lambda: steps() >= STEPS_BEFORE)
    return {
        "containers": float(len(containers.containers())),
        "load_average_before_start": load,
        "seconds_to_ready": start(),
        "seconds_to_10_steps": start() + train(),
        "samples_scored": _scored(),
    }


def _host_agents() -> dict[str, float]:
    """Agents on this machine, with the credential that `up` has written: gRPC, then HTTP."""
    folder = str(containers.AGENT_FOLDER)
    command = [sys.executable, "examples/minimal_agent.py", "127.0.0.1:50052", "quickstart", folder]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    assert not is_trained(["of nobody"], _trained()), "control"
    rollouts: set[str] = set()
    with _timed() as train:
        _wait_for("a sample of the page's agent", partial(_is_page_trained, rollouts))
    return {
        "host_agent_rollouts": 1.0,
        "host_http_agent_rollouts": float(len(rollouts)),
        "seconds_until_host_sample_trained": train(),
    }


def _is_page_trained(rollouts: set[str]) -> bool:
    """Run the page's agent, again if need be: a group whose rewards are equal trains nothing."""
    rollouts.update(run_page())
    return is_trained(rollouts, _trained())


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


def _best() -> dict[str, float]:
    """The first weights were evaluated before the first step; the trainer keeps the best ones."""
    first, *_ = _evaluations()
    assert (first["label"], first["step"]) == ("before", 0), first
    with _timed() as seconds:
        _wait_for("a best checkpoint", lambda: bool(_said("trainer", _BEST)))
    best = json.loads(_said("trainer", _BEST))
    assert best["step"] > 0, best
    return {"best_checkpoint_seen": 1.0, "seconds_to_best_checkpoint": seconds()}


def _ended_early() -> dict[str, float]:
    """An evaluator whose target is met ends training: the last step is evaluated, the run over."""
    containers.compose("start", "trajectory-manager")
    os.environ["STOP_TARGET"] = _ANY_MEAN
    containers.compose("up", "--detach", "--no-deps", "evaluator")
    with _timed() as seconds:
        _wait_for("the last evaluation", lambda: _last_label() == "after")
    last, done = _evaluations()[-1], steps()
    assert last["step"] == done < int(os.environ["NUM_STEPS"]), (last, done)
    return {"early_stop_seen": 1.0, "seconds_to_early_stop": seconds()}


def _last_label() -> str:
    lines = _evaluations()
    return str(lines[-1]["label"]) if lines else ""


def _evaluations() -> list[dict[str, Any]]:
    return [json.loads(line) for line in _said("evaluator", _EVALUATED).splitlines()]


def _said(service: str, program: str) -> str:
    """What a Python program says in a service's container; empty: it failed."""
    try:
        return containers.compose("exec", "-T", service, "python", "-c", program, capture=True)
    except subprocess.CalledProcessError:
        return ""


def _trained() -> str:
    """The samples of each step, JSON lines."""
    return containers.compose("exec", "-T", "trainer", "python", "-c", _TRAINED, capture=True)


def steps() -> int:
    """Optimizer steps so far; 0 while the trainer cannot be asked."""
    try:
        return int(
            containers.compose("exec", "-T", "trainer", "python", "-c", _COUNT, capture=True)
        )
    except (subprocess.CalledProcessError, ValueError):
        return 0


def _scored() -> float:
    """Samples that the scoring service has scored, by its own count."""
    text = containers.compose("exec", "-T", "scoring", "python", "-c", _METRICS, capture=True)
    return sum(float(value) for value in _SCORED.findall(text))


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
