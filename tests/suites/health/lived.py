"""Runs that learn, and are stopped, killed and resumed meanwhile: none of it is an alarm."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.suites.health.recomputed import all_differing
from tests.suites.health.way import Found, Way, read, start

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
    lived = Lived()
    for number, (last, sent) in enumerate(zip((*steps, None), (*_ENDS, None), strict=True)):
        resumed = ["--resume"] if number else []
        with start(way, folder, *resumed, log=f"terminal-{number}.log") as launched:
            until = time.monotonic() + seconds
            while launched.launcher.poll() is None and time.monotonic() < until:
                if last is not None and sent and launched.step >= last:
                    launched.launcher.send_signal(sent)
                    launched.launcher.wait(seconds)
                time.sleep(0.1)
        found = read(launched.lines)
        found.code = launched.launcher.returncode
        lived.found.append(found)
    lived.differ = all_differing(launched.run)
    return lived
