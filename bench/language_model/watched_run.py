"""A training run as a user starts it, with what it left and what its processes took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from seamflow.inspect.run_files import json_lines, read_steps

from tools.provenance import ROOT

_SEAMFLOW = (sys.executable, "-P", "-c", "from seamflow.cli.main import main; main()")
_POLL_SECONDS = 5.0
_COMPUTING = ("rollout.server", "trainer", "sglang")
"""Processes that multiply the model's matrices, or how their names begin; others are services."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """What a run left and took."""

    folder: Path
    """The run's folder."""
    seconds: float
    """From its start to its end, loading and evaluations included."""
    peak_bytes: int
    """Most memory of all its processes together; a page that they share counts once."""
    cpu_seconds: Mapping[str, float]
    """By the module that a process runs."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The trainer's lines, one for each optimizer step."""
        return read_steps(self.folder / "metrics.jsonl")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Results on the held-out tasks, oldest first."""
        lines = json_lines(self.folder / "evaluation.jsonl")
        return [line for line in lines if line.get("mean") is not None]

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary.json."""
        read: dict[str, Any] = json.loads((self.folder / "summary.json").read_text("utf-8"))
        return read

    @property
    def services_cpu_share(self) -> float:
        """CPU seconds of all processes but rollout servers and trainer, over those of all."""
        spent = self.cpu_seconds.items()
        computing = sum(seconds for name, seconds in spent if name.startswith(_COMPUTING))
        return 1 - computing / sum(self.cpu_seconds.values())


def make_project(name: str, model: str = "smollm2") -> Path:
    """The folder of `seamflow init --model`, new, in runs/bench."""
    folder = ROOT / "runs" / "bench" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*_SEAMFLOW, "init", "--model", model, str(folder)], check=True)
    return folder


def train(
    project: Path, name: str, settings: Mapping[str, object], config: Path | None = None
) -> WatchedRun:
    """Train in a project's folder until the run ends.

    Args:
        project: with a train.toml.
        name: of the run.
        settings: that differ from the project's, by their dotted name.
        config: another file than its train.toml.

    Raises:
        SystemExit: it failed; names its logs.
    """
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    began = time.monotonic()
    named = ("--config", str(config)) if config else ()
    command = [*_SEAMFLOW, "train", "--name", name, *named, *sets]
    peak, spent, code = watch(command, project, os.environ)
    folder = project / "runs" / name
    if code:
        raise SystemExit(f"{name} ended with {code}: see {folder}/logs")
    seconds = time.monotonic() - began
    return WatchedRun(folder=folder, seconds=seconds, peak_bytes=peak, cpu_seconds=spent)


def watch(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[int, dict[str, float], int]:
    """Run a command to its end; most bytes at a time, CPU seconds by module, exit code."""
    peak, spent = 0, dict[tuple[str, int], float]()
    with subprocess.Popen(command, cwd=folder, env=environment) as run:
        root = psutil.Process(run.pid)
        while run.poll() is None:
            processes = [root, *root.children(recursive=True)]
            peak = max(peak, sum(map(_memory, processes)))
            for each in processes:
                _add_cpu_seconds(spent, each)
            time.sleep(_POLL_SECONDS)
    by_module: dict[str, float] = defaultdict(float)
    for (module, _), seconds in spent.items():
        by_module[module] += seconds
    return peak, dict(by_module), run.returncode


def _add_cpu_seconds(spent: dict[tuple[str, int], float], process: psutil.Process) -> None:
    with suppress(psutil.Error):
        times = process.cpu_times()
        spent[module_of(process.cmdline()), process.pid] = times.user + times.system


def module_of(command: Sequence[str]) -> str:
    """What a command runs: the module after -m, else the name of its script or program."""
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    scripts = [Path(part).stem for part in command if part.endswith(".py")]
    return scripts[0] if scripts else Path(command[0]).name if command else "ended"


def _memory(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0
