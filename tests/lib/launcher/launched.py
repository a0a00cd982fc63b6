"""A small run through the real launcher, to which something is done while it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from redis import Redis

ROOT = next(each for each in Path(__file__).parents if (each / "pyproject.toml").exists())
LAUNCHER = ("-m", "services.launcher")
_NAME = "run"
CONFIG = """\
[launcher]
name = "run"
prepare = "tests.suites.health.letter_model"
model = "{run}/prepared/model"
tasks = "tasks.jsonl"
heldout_tasks = "tasks.jsonl"
agent = "tests.suites.health.agents:Letters"
nodes = ["node-a: rollout", "node-b: train"]
group_size = 4
groups_per_step = 2
max_staleness = 1

[dataloader]
epochs = 0

[rollout_server]
max_context = 64

[evaluation]
every_steps = 2

[trainer]
num_steps = 100000

[trainer.checkpoint]
every = 2

[trainer.algorithm]
name = "grpo"
"""
_END_SECONDS = 60.0
_POLL_SECONDS = 0.1


@dataclass
class Launched:
    """A launcher under way in `folder`, seen by its terminal and its files."""

    folder: Path
    launcher: subprocess.Popen[bytes]
    run: Path
    """The run's own folder."""
    terminal: Path
    """What it prints."""
    flags: tuple[str, ...]
    """With which it was started."""

    @classmethod
    def start(
        cls,
        folder: Path,
        *flags: str,
        config: str = CONFIG,
        program: Sequence[str] = LAUNCHER,
        runs: Path | None = None,
        log: str = "terminal.log",
        is_closed: bool = False,
    ) -> Self:
        """Start it.

        Args:
            folder: where it is started.
            flags: those of `seamflow train`.
            config: train.toml, of a run named "run".
            program: what runs the launcher.
            runs: where the run's folder is made.
            log: the file in `folder` that is its terminal.
            is_closed: whether its output is a pipe that is closed after the first line.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.toml").write_text(config)
        rows = (f'{{"task_id": "{each}", "payload": {{"letter": "{each}"}}}}\n' for each in "abcd")
        (folder / "tasks.jsonl").write_text("".join(rows))
        places = () if runs is None else ("--runs-folder", str(runs))
        terminal = folder / log
        with terminal.open("wb") as output:
            launcher = subprocess.Popen(
                [sys.executable, *program, "--config", "train.toml", *places, *flags],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE if is_closed else output,
                stderr=subprocess.STDOUT,
            )
        if launcher.stdout is not None:
            launcher.stdout.readline()
            launcher.stdout.close()
        return cls(folder, launcher, (runs or folder / "runs") / _NAME, terminal, flags)

    @property
    def lines(self) -> list[str]:
        """What the terminal shows so far."""
        return self.terminal.read_text(errors="replace").splitlines()

    @property
    def processes(self) -> dict[str, int]:
        """The ids of its processes by name."""
        file = self.run / "logs" / "processes.json"
        if not file.exists():
            return {}
        return {name: each["pid"] for name, each in json.loads(file.read_text()).items()}

    @property
    def store(self) -> Redis:
        """A client of its private Redis."""
        password = (self.run / "redis.conf").read_text().split()[1]
        title = Path(f"/proc/{self.processes['redis']}/cmdline").read_text()
        return Redis(port=int(title.rpartition(":")[2].rstrip(" \0")), password=password)

    @property
    def step(self) -> int:
        """The newest that has been trained."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return max((json.loads(line).get("step", 0) for line in lines[-1:]), default=0)

    def until(self, condition: Callable[[], object], seconds: float) -> float | None:
        """Seconds until `condition` holds, or the launcher has ended; None: it took longer."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                return None
            if self.launcher.poll() is not None and not condition():
                return None
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - began

    def shows(self, text: str, after: int = 0) -> Callable[[], bool]:
        """Whether a line from the `after`-th on holds `text`."""
        return lambda: any(text in line for line in self.lines[after:])

    def stop(self) -> int:
        """End it by Ctrl-C, or kill it; its exit code."""
        if self.launcher.poll() is None:
            self.launcher.send_signal(signal.SIGINT)
            try:
                self.launcher.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
        return self.launcher.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
