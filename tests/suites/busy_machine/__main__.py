"""`make test-busy`: `make test` several times in a row beside processes that never pause.

On a busy machine a test fails that measures the machine, or waits for a time and not for what it
needs. No test is repeated here.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bench.report import Report
from tools.provenance import ROOT

_LAST_LINE = re.compile(r"^(?:\d+ [a-z]+, )*\d+ [a-z]+ in ([\d.]+)s", re.MULTILINE)


def main() -> None:
    """Run and report; exits with 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--loops", type=int, default=2, help="processes that compute meanwhile")
    given = parser.parse_args()
    with _busy(given.loops):
        found = [_run(number) for number in range(1, given.runs + 1)]
    raw = {name: [each.get(name, 0.0) for each in found] for name in found[0] | {"failed": 0.0}}
    figures = {
        "runs": float(given.runs),
        "busy_loops": float(given.loops),
        "passed_least": min(raw["passed"]),
        "failed": sum(raw["failed"]),
        "seconds_max": max(raw["seconds"]),
    }
    Report(bench="busy_machine", figures=figures, raw=raw, seeds=[]).publish()
    sys.exit(1 if figures["failed"] else 0)


@contextmanager
def _busy(loops: int) -> Iterator[None]:
    """Processes that compute without a pause, as long as the context lives."""
    command = [sys.executable, "-c", "while True: pass"]
    working = [subprocess.Popen(command) for _ in range(loops)]
    try:
        yield
    finally:
        for each in working:
            each.kill()
            each.wait()


def _run(number: int) -> dict[str, float]:
    print(f"run {number}", flush=True)
    done = subprocess.run(
        ["make", "test"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout, flush=True)
    return counts(done.stdout)


def counts(output: str) -> dict[str, float]:
    """Tests by how they ended, and "seconds", by the last line of pytest.

    Raises:
        SystemExit: it came to no end.
    """
    lines = list(_LAST_LINE.finditer(output))
    if not lines:
        raise SystemExit("pytest ended without a result: see above")
    last = lines[-1]
    ended = re.findall(r"(\d+) ([a-z]+)", last[0].partition(" in ")[0])
    return {name: float(number) for number, name in ended} | {"seconds": float(last[1])}


if __name__ == "__main__":
    main()
