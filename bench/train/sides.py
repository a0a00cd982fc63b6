"""Runs of either side, watched from outside and counted alike.

Both write a JSON line for each optimizer step, with its `num_tokens` (sampled tokens whose loss
counted) and the `time` of its end. What a run takes is read off these lines, after a warm-up; its
CPU seconds are those of the process that was started and of all below it.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from seamflow.inspect.run_files import read_steps

ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.1
_END_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which steps of a run are measured."""

    warm_up: int
    """Steps before."""
    steps: int
    """Steps that count."""

    @property
    def last(self) -> int:
        """Number of the last step that counts."""
        return self.warm_up + self.steps

    @property
    def in_all(self) -> int:
        """Steps of a run: one more, as ours writes its only checkpoint with the last."""
        return self.last + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a run took, between the end of its warm-up and the end of its window."""

    tokens: int
    """Sampled tokens that were trained on."""
    seconds: float
    """By the clock."""
    steps: int
    """Optimizer steps."""
    cores: float
    """Cores that its processes kept busy, on average."""

    def figures(self) -> dict[str, float]:
        """What is compared, by name."""
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "cpu_seconds_per_1k_tokens": 1000 * self.cores * self.seconds / self.tokens,
            "cores_busy": self.cores,
            "seconds_per_step": self.seconds / self.steps,
            "tokens_per_step": self.tokens / self.steps,
        }


def speed(lines: Sequence[Mapping[str, Any]], window: Window, cores: float) -> Speed:
    """Count the window's steps.

    Args:
        lines: a run's metrics, one for each step.
        window: what counts.
        cores: mean of busy cores in that time.

    Raises:
        ValueError: the run ended before the window did.
    """
    by_step = {line["step"]: line for line in lines}
    counted = range(window.warm_up + 1, window.last + 1)
    missing = [step for step in (window.warm_up, *counted) if step not in by_step]
    if missing:
        raise ValueError(f"steps {missing} are missing: the run ended early")
    return Speed(
        tokens=sum(by_step[step]["num_tokens"] for step in counted),
        seconds=by_step[window.last]["time"] - by_step[window.warm_up]["time"],
        steps=window.steps,
        cores=cores,
    )


def waits(lines: Sequence[Mapping[str, Any]], window: Window) -> dict[str, float]:
    """The window's steps from our trainer's metrics.

    Returns:
        publish_stall_share: of the time, weights were gathered or a publish was waited for;
        after_last_sample_share: of the time, from the lease of a step's last sample to the end of
            the optimizer step;
        packing: tokens of sequences for each that was computed.
    """
    by_step = {line["step"]: line for line in lines}
    counted = [by_step[step] for step in range(window.warm_up + 1, window.last + 1)]
    seconds = counted[-1]["time"] - by_step[window.warm_up]["time"]
    computed = sum(line["computed_tokens"] for line in counted)
    return {
        "publish_stall_share": sum(line["seconds"]["publish"] for line in counted) / seconds,
        "after_last_sample_share": sum(line["seconds_after_last_sample"] for line in counted)
        / seconds,
        "packing": sum(line["packing"] * line["computed_tokens"] for line in counted) / computed,
    }


def watch(
    command: Sequence[str], environment: Mapping[str, str], metrics: Path, window: Window
) -> Speed:
    """Run `command` to its end.

    Args:
        command: arguments, the program first.
        environment: all of it.
        metrics: where its steps appear.
        window: which of them count.

    Raises:
        RuntimeError: it failed, or ended early; with the end of its output.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            begin, end = (_spent(process, metrics, step) for step in (window.warm_up, window.last))
            code = process.wait()
        finally:
            _end(process)
        errors.seek(0)
        if code or begin is None or end is None:
            output = errors.read()[-2000:]
            raise RuntimeError(f"{' '.join(command[:3])} ended with code {code}: {output}")
    cores = (end[1] - begin[1]) / (end[0] - begin[0])
    return speed(read_steps(metrics), window, cores)


def read_config(file: str) -> dict[str, Any]:
    """The tables of one of the repository's TOML files."""
    return tomllib.loads((ROOT / file).read_text(encoding="utf-8"))


def _spent(
    process: subprocess.Popen[bytes], metrics: Path, step: int
) -> tuple[float, float] | None:
    """(now, CPU seconds so far) once the step is done; None if the process ended before."""
    while process.poll() is None:
        lines = read_steps(metrics)
        if lines and lines[-1]["step"] >= step:
            return time.monotonic(), _cpu_seconds(psutil.Process(process.pid))
        time.sleep(_POLL_SECONDS)
    return None


def _cpu_seconds(root: psutil.Process) -> float:
    """Of a process and all below it, those included that have ended and were waited for."""
    spent = 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            spent += times.user + times.system + times.children_user + times.children_system
    return spent


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing is left behind, whatever went wrong; a launcher ends its children first."""
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
