"""`python -m tools.suites NAME`: run a suite whole, and record that it passed.

`next` instead of a name takes the next one in rotation, and `list` shows when each last passed. A
run that --minutes ends has neither passed nor failed: it exits with 0 and says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from bench.provenance import provenance
from tools.suites.passes import Suite, last_passes, next_in_rotation, record_pass, suites

ROOT = Path(__file__).parents[2]
_GRACE_SECONDS = 30.0


def main() -> None:
    """Run a suite; exits with its code."""
    known = {suite.name: suite for suite in suites(ROOT)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=[*known, "next", "list"], metavar="NAME")
    parser.add_argument("--minutes", type=float, help="end it after this time (no limit)")
    given = parser.parse_args()
    if given.name == "list":
        return _list(list(known.values()))
    is_next = given.name == "next"
    suite = next_in_rotation(known.values(), last_passes(ROOT)) if is_next else known[given.name]
    sys.exit(_run(suite, given.minutes))


def _run(suite: Suite, minutes: float | None) -> int:
    print(f"make {suite.name}: {suite.about}", flush=True)
    began, about = time.monotonic(), provenance({})
    command = [sys.executable, "-m", "tools.suites.contained", "make", suite.name]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            code = process.wait(None if minutes is None else 60 * minutes)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(_GRACE_SECONDS)
            print(f"{suite.name} was ended after {minutes:g} minutes: neither passed nor failed")
            return 0
    if code == 0:
        done = record_pass(ROOT, suite.name, time.monotonic() - began, about)
        print(f"{suite.name} passed on {done.commit} in {done.seconds:.0f} s")
    return code


def _list(known: list[Suite]) -> None:
    passes = last_passes(ROOT)
    for suite in known:
        done = passes.get(suite.name)
        when = "no pass recorded" if done is None else f"{done.date} on {done.commit}"
        print(f"{suite.name:20} {when}{'  (in rotation)' if suite.in_ci else ''}")


if __name__ == "__main__":
    main()
