"""The checks of a suite: each is a function that asserts; one that fails leaves a screenshot."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.suites.console.browser import Visit

Check = Callable[[Visit], None]


@dataclass(slots=True, kw_only=True)
class Checks:
    """What was tried and what did not hold."""

    folder: Path
    """Where screenshots are kept."""
    failed: dict[str, str] = field(default_factory=dict)
    """Check -> what did not hold."""
    passed: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    """Figures that checks measured."""

    def run(self, visit: Visit, checks: Iterable[Check], label: str = "") -> None:
        """Carry out each; an error in the console of the browser fails the check too."""
        for check in checks:
            self.one(visit, f"{label} {getattr(check, '__name__', check)}".strip(), check)

    def one(self, visit: Visit, name: str, check: Check) -> None:
        """Carry out one check under a name."""
        visit.errors.clear()
        began = time.monotonic()
        try:
            check(visit)
            assert not visit.errors, visit.errors
        except Exception as error:
            self.failed[name] = f"{error}\n{traceback.format_exc(limit=-2)}"
            visit.page.screenshot(path=self.folder / f"failed-{_file_name(name)}.png")
            print(f"FAILED {name}: {error}", flush=True)
        else:
            self.passed += 1
            print(f"ok {name} ({time.monotonic() - began:.1f} s)", flush=True)

    def picture(self, visit: Visit, name: str) -> None:
        """Keep what is shown."""
        visit.page.screenshot(path=self.folder / f"{_file_name(name)}.png")


def _file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
