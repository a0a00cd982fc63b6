"""Training across the link: its speed, and what cuts of the link cost.

Speed is compared within one run, in stretches with and without delay by turns, so that what else
the machine does counts for both alike.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.wan.placed_run import FAILED, FINISH, RUN
from bench.wan.slow_link import NAMESPACES, SlowLink

_LOOK_SECONDS = 0.05
_START_SECONDS = 400.0
_STALLED_SECONDS = 300.0
_WARM_STEPS = 4
_ROUND_TRIP_MS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A run, and what is done to its link, in this order."""

    mode: str = "asynchronous_push_pull"
    """Of Echo: name of a file in examples/papers, without `echo_`."""
    rounds: int = 5
    """Each a stretch with the delay and one without."""
    stretch_steps: int = 8
    """Of each stretch."""
    long_cut: float = 60.0
    """Seconds of the first cut."""
    cuts: int = 10
    """Cuts of a random length of 1 to 10 s, by turns with some steps."""
    flaps: int = 15
    """Times that a flapping link is away for a second and there for a second."""


@dataclass(slots=True)
class _Training:
    """A run under way, seen by its files."""

    process: subprocess.Popen[bytes]
    folder: Path
    link: SlowLink

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far."""
        file = self.folder / RUN / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    @property
    def num_chunks(self) -> int:
        """Pieces of answers that agents have received so far."""
        file = self.folder / RUN / "received.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def until(self, number: int, seconds: float = _STALLED_SECONDS) -> float:
        """Seconds until step `number` is done."""
        began = time.monotonic()
        while self.num_steps < number:
            if self.process.poll() is not None or time.monotonic() - began > seconds:
                log = (self.folder / "run.log").read_text(errors="replace")
                raise RuntimeError(f"no step {number} in {seconds:.0f} s:\n{log[-4000:]}")
            time.sleep(_LOOK_SECONDS)
        return time.monotonic() - began

    def steps_per_second(self, number: int, round_trip_ms: float) -> float:
        """Measured over `number` steps, from the end of a step."""
        self.link.round_trip_ms = round_trip_ms
        self.until(self.num_steps + 1)
        return number / self.until(self.num_steps + number)

    def cut(self, seconds: float) -> float:
        """Cut the link for `seconds`; seconds from its end to that of the next step."""
        self.link.is_cut = True
        time.sleep(seconds)
        self.link.is_cut = False
        return self.until(self.num_steps + 1)


def figures(schedule: Schedule, seed: int, *, is_quick: bool) -> dict[str, float]:
    """Of one run, over a link that all this is done to."""
    with _training(schedule.mode, is_quick) as training:
        training.until(_WARM_STEPS, _START_SECONDS)
        found = _speed(training, schedule)
        found |= _after_cuts(training, schedule, random.Random(seed))
        found["steps"] = training.num_steps
        (training.folder / FINISH).touch()
        training.process.wait(_STALLED_SECONDS)
        return found | lost_and_doubled(training.folder / RUN)


@contextmanager
def _training(mode: str, is_quick: bool) -> Iterator[_Training]:
    link = SlowLink(round_trip_ms=0.0, megabits=100.0, queue_ms=120.0)
    with link.open(), TemporaryDirectory(prefix="seamflow-wan-") as folder:
        command = [sys.executable, "-m", "bench.wan.placed_run", folder, mode, str(is_quick)]
        with Path(folder, "run.log").open("wb") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", NAMESPACES[1], *command], stdout=log, stderr=log
            )
        try:
            yield _Training(process, Path(folder), link)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _speed(training: _Training, schedule: Schedule) -> dict[str, float]:
    ratios, sent, trained = [], (0, 0), 0
    for _ in range(schedule.rounds):
        without = training.steps_per_second(schedule.stretch_steps, 0.0)
        before, begun = training.link.sent_bytes, training.num_steps
        over = training.steps_per_second(schedule.stretch_steps, _ROUND_TRIP_MS)
        west, east = training.link.sent_bytes
        sent = (sent[0] + west - before[0], sent[1] + east - before[1])
        trained += training.num_steps - begun
        ratios.append(over / without)
        _say(f"{over:.3f} steps/s over the link, {without:.3f} without")
    return {
        "speed_over_link": median(ratios),
        "speed_over_link_lowest": min(ratios),
        "speed_over_link_highest": max(ratios),
        "megabytes_of_weights_a_step": sent[0] / trained / 1e6,
        "megabytes_of_samples_a_step": sent[1] / trained / 1e6,
    }


def _after_cuts(training: _Training, schedule: Schedule, chance: random.Random) -> dict[str, float]:
    """Seconds until a step is done again."""
    steps, chunks = training.num_steps, training.num_chunks
    training.link.is_cut = True
    time.sleep(schedule.long_cut)
    in_cut = training.num_steps - steps, training.num_chunks - chunks
    after_long = training.cut(0.0)
    _say(f"{after_long:.1f} s after {schedule.long_cut:.0f} s, {in_cut[0]} steps in it")
    after = []
    for _ in range(schedule.cuts):
        seconds = chance.uniform(1, 10)
        after.append(training.cut(seconds))
        _say(f"{after[-1]:.1f} s after {seconds:.1f} s")
        training.until(training.num_steps + 1)
    for _ in range(schedule.flaps):
        training.link.is_cut = not training.link.is_cut
        time.sleep(1.0)
    after_flapping = training.cut(1.0)
    _say(f"{after_flapping:.1f} s after a flapping link")
    return {
        "seconds_until_step_after_long_cut": after_long,
        "steps_in_long_cut": in_cut[0],
        "chunks_received_in_long_cut": in_cut[1],
        "seconds_until_step_after_cuts_most": max(after, default=0.0),
        "seconds_until_step_after_flapping": after_flapping,
    }


def lost_and_doubled(run: Path) -> dict[str, float]:
    """What the run's own records say, once it has ended."""
    summary = json.loads((run / "summary.json").read_text())
    trained = _lines(run / "trained_samples.jsonl")
    steps = [line["step"] for line in trained]
    samples = [name for line in trained for name in line["sample_ids"]]
    return {
        "tokens_received": summary["tokens_received_by_agents"],
        "tokens_lost": summary["tokens_lost"] + summary["tokens_with_wrong_version"],
        "tokens_doubled": summary["tokens_duplicated"],
        "samples_trained_twice": len(samples) - len(set(samples)),
        "steps_lost_or_doubled": len(set(range(1, summary["optimizer_steps"] + 1)) ^ set(steps))
        + len(steps)
        - len(set(steps)),
        "rollouts": summary["rollouts"],
        "agent_calls_failed": int((run / FAILED).read_text()) + _failed_calls(run),
        "process_restarts": summary["process_restarts"],
        "staleness_most": summary["max_staleness_seen"],
    }


def _failed_calls(run: Path) -> int:
    """Calls that agents began and that ended with an error.

    Those that agents cancelled themselves are not: at the end of the run, and where a lease was
    lost, which makes a failed rollout.
    """
    failed = Counter(
        f"{each['method']}: {each['code']}"
        for each in _lines(run / "logs" / "rollout_gateway.log")
        if each.get("msg") == "call"
        and each["method"].endswith(("/Generate", "/FinishRollout"))
        and each["code"] not in ("OK", "CANCELLED")
    )
    for name, number in failed.items():
        _say(f"{number} of {name}")
    return failed.total()


def _lines(file: Path) -> Sequence[Mapping[str, Any]]:
    lines = file.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
