"""No process decides anything by a clock that people and daemons may set while it runs.

Leases, timeouts and intervals go by the monotonic clock, by the store's (docs/guarantees.md), or
by `services.chassis.steady_clock`. The places that read the wall clock are listed with what for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.repository.test_architecture import PACKAGES, files_of, module_of

_READERS = {
    "time": ("time", "time_ns", "localtime", "gmtime", "strftime", "ctime", "clock_gettime"),
    "datetime": ("now", "utcnow", "today"),
    "date": ("today",),
}
_ALLOWED = {
    "rollout.http_gateway.dialects.chat_completions": "`created` of an answer, for people",
    "rollout.http_gateway.dialects.responses": "`created_at` of an answer, for people",
    "seamflow.inspect.lives": "when a life of the launcher began and ended, for people",
    "seamflow.inspect.snapshot": "how long ago what services report was, for people",
    "seamflow.processes.procfs": "the clock since boot, by which /proc gives ages",
    "services.launcher.evaluate_checkpoint": "the name of a run",
    "services.launcher.hosts.certificates": "how long a certificate is valid",
    "services.launcher.report.occupancy": "where a plot begins, next to the times of steps",
    "services.chassis.steady_clock": "where it starts",
    "services.weights.cli": "when a version was committed, for people",
    "tools.backup.save": "when a backup was made, for people",
    "tools.provenance": "day of a result, for people",
    "tools.release": "day of a release, for people",
    "trainer.tracking.mlflow": "when a metric was logged, for people",
    "trainer.tracking.step_record": "when a step ended, for people and plots",
}


def readers(source: str) -> Iterator[str]:
    """Names in `source` that read the wall clock, called or passed on."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else ""
            owner = node.value.id if isinstance(node.value, ast.Name) else owner
            if node.attr in _READERS.get(owner, ()):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"time.{n.name}" for n in node.names if n.name in _READERS["time"])


def of_file(file: Path) -> list[str]:
    """`readers` of a module."""
    return list(readers(file.read_text(encoding="utf-8")))


def test_the_wall_clock_is_read_only_for_people() -> None:
    """A new place needs a reason, and one that is gone leaves the list."""
    found = {module_of(f) for package in PACKAGES for f in files_of(package) if of_file(f)}
    assert found == set(_ALLOWED)


def test_every_way_to_read_it_is_found() -> None:
    """Or a deadline could go by it unseen."""
    bad = (
        "import time, datetime\nfrom time import time_ns\n"
        "end = time.time() + 5\nclock = time.time\n"
        "now = datetime.datetime.now()\nthen = datetime.utcnow()\nlocal = time.localtime()\n"
    )
    assert sorted(readers(bad)) == [
        "datetime.now",
        "datetime.utcnow",
        "time.localtime",
        "time.time",
        "time.time",
        "time.time_ns",
    ]
    good = "import time\nend = time.monotonic() + 5\ntime.sleep(1)\nloop.time()\n"
    assert list(readers(good)) == []
