"""Runs that learn, and are stopped, killed and resumed meanwhile: none of it is an alarm."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.suites.health.recomputed import all_differing
from tests.suites.health.way import Found, Way, prepare, read, start, stop

_ENDS = (signal.SIGINT, signal.SIGKILL)


@dataclass(slots=True, kw_only=True)
class Lived:
    """What is said of a run of three lives."""

    found: list[Found] = field(default_factory=list)
    """By the terminal, of each life."""
    differ: list[str] = field(default_factory=list)
    """Figures that are shown wrongly."""

    @property
    def false_alarms(self) -> list[str]:
        """Lines about health, failures and alarms: nothing is wrong with the run."""
        named = [line for found in self.found for _, line in found.named.values()]
        ends = [] if self.found[-1].code == 0 else [f"exit code {self.found[-1].code}"]
        return [*named, *(line for found in self.found for line in found.alarms), *ends]


def live(way: Way, folder: Path, steps: tuple[int, int], seconds: float = 240.0) -> Lived:
    """Train in `folder`; Ctrl-C after the first of `steps`, kill -9 after the second, resume each.

    Args:
        way: settings and agent of a run that learns.
        folder: that is made.
        steps: after which a life ends.
        seconds: that each life may take.
    """
    prepare(way, folder)
    lived = Lived()
    for number, (last, sent) in enumerate(zip((*steps, None), (*_ENDS, None), strict=True)):
        log = folder / f"terminal-{number}.log"
        child = start(way, folder, log, *(["--resume"] if number else []))
        try:
            until = time.monotonic() + seconds
            while child.poll() is None and time.monotonic() < until:
                if last is not None and sent and _has_made(folder, last):
                    child.send_signal(sent)
                    child.wait(seconds)
                time.sleep(0.1)
        finally:
            stop(child)
        found = read(log.read_text(errors="replace"))
        found.code = child.returncode
        lived.found.append(found)
    lived.differ = all_differing(folder / "runs" / "health")
    return lived


def _has_made(folder: Path, step: int) -> bool:
    file = folder / "runs" / "health" / "metrics.jsonl"
    return file.is_file() and file.read_bytes().count(b"\n") >= step
