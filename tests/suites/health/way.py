"""A short run through the real launcher, and what its terminal says of its health.

Everything of the run is real: processes, store, model, agent. What is set is the mistake.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.lib.launcher.launched import Launched

_CONFIG = """\
[launcher]
name = "run"
prepare = "tests.suites.health.letter_model"
model = "{run}/prepared/model"
tasks = "tasks.jsonl"
agent = "tests.suites.health.agents:Letters"
nodes = ["node-a: rollout", "node-b: train"]
group_size = 8
groups_per_step = 4
max_staleness = 1
token_audit = true

[dataloader]
epochs = 0

[rollout_server]
max_context = 64

[trainer]
num_steps = 8

[trainer.optimizer]
learning_rate = 1e-2

[trainer.algorithm]
name = "grpo"
"""
_STEP = re.compile(r"step (\d+) of \d+:")
_HEALTH = re.compile(r"health \((\w+)\): (.*)")
_ALARM = re.compile(r"\s*(\d+ × )?(failure [A-Z]+ of|alarm: |dead letters: )")
REFUSED = "refused"
"""Rule of a run that does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A run, and what is to be said of it."""

    name: str
    """Of the figure."""
    rule: str = ""
    """That must be named; empty: the run is healthy."""
    cure: str = ""
    """Words of its cure."""
    settings: tuple[str, ...] = ()
    """`table.name=value` beside those of `_CONFIG`."""
    flags: tuple[str, ...] = ()
    """Of the launcher."""
    algorithm: str = ""
    """More lines of [trainer.algorithm]."""
    within: int = 5
    """Steps after which it must have been named."""
    kills: str = ""
    """Process that is killed after the first step."""


@dataclass(slots=True, kw_only=True)
class Found:
    """What the terminal said."""

    code: int | None = None
    """Exit code; None: it was stopped."""
    named: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Rule -> steps shown before it, and its line."""
    refusal: str = ""
    """Last line of a run that did not start."""
    step: int = 0
    """Steps shown."""
    alarms: list[str] = field(default_factory=list)
    """Lines about failures, dead letters and alarms of the trainer."""


def is_named(way: Way, found: Found) -> bool:
    """Whether the terminal told the mistake in time, with its cure."""
    if way.rule == REFUSED:
        return bool(found.code) and way.cure in found.refusal
    step, line = found.named.get(way.rule, (way.within + 1, ""))
    return step <= way.within and way.cure in line


def is_healthy(found: Found) -> bool:
    """Whether the run came to its end without an alarm."""
    return found.code == 0 and found.step > 0 and not found.named


def run(way: Way, folder: Path, seconds: float = 240.0) -> Found:
    """Train in `folder` until the rule is named, the run ends, or `seconds` have passed."""
    with start(way, folder) as launched:
        return _watched(launched, way, seconds)


def start(way: Way, folder: Path, *flags: str, log: str = "terminal.log") -> Launched:
    """Start the launcher, whose terminal is a file."""
    given = (*(f"--set={each}" for each in way.settings), *way.flags, *flags)
    return Launched.start(folder, *given, config=_CONFIG + way.algorithm, log=log)


def _watched(launched: Launched, way: Way, seconds: float) -> Found:
    until, kills = time.monotonic() + seconds, bool(way.kills)
    while True:
        code = launched.launcher.poll()  # before the log is read, so that it is whole
        found = read(launched.lines)
        if kills and found.step:
            kills = False
            os.kill(launched.processes[way.kills], signal.SIGKILL)
        if code is not None:
            found.code = code
            return found
        is_known = way.rule in found.named or found.step > way.within + 3
        if (way.rule and is_known) or time.monotonic() > until:
            return found
        time.sleep(0.2)


def read(lines: Iterable[str]) -> Found:
    """What a terminal has shown so far."""
    found = Found()
    for line in lines:
        if (step := _STEP.search(line)) is not None:
            found.step = int(step[1])
        if (health := _HEALTH.search(line)) is not None and health[2] != "over":
            found.named.setdefault(health[1], (found.step, health[2]))
        if line.startswith("launcher: "):
            found.refusal = line
        if _ALARM.match(line):
            found.alarms.append(line.strip())
    return found
