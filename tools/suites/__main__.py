"""`python -m tools.suites suite NAME`: run a suite whole, and record that it passed.

`next` instead of a name takes the next one in rotation; without a name all are listed, with the day
when each last passed. A run that --minutes ends has neither passed nor failed: it exits with 0 and
says so. `bench NAME` runs a bench, which records its figures itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.provenance import provenance
from tools.suites.passes import (
    Suite,
    benches,
    last_passes,
    next_in_rotation,
    record_pass,
    suites,
)

ROOT = Path(__file__).parents[2]
_GRACE_SECONDS = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["suite", "bench"])
    parser.add_argument("name", nargs="?", help="without one they are listed")
    parser.add_argument("--minutes", type=float, help="end it after this time (no limit)")
    given = parser.parse_args()
    is_suite = given.kind == "suite"
    known = {each.name: each for each in (suites if is_suite else benches)(ROOT)}
    if given.name is None:
        return _list(list(known.values()))
    if is_suite and given.name == "next":
        chosen = next_in_rotation(known.values(), last_passes(ROOT))
    else:
        name = given.name if given.name in known else f"test-{given.name}"
        if name not in known:
            parser.error(f"there is no {given.name!r}; give one of {', '.join(known)}")
        chosen = known[name]
    sys.exit(_run(chosen, given.minutes, records=is_suite))


def _run(suite: Suite, minutes: float | None, *, records: bool) -> int:
    print(f"{suite.name}: {suite.about}", flush=True)
    if suite.needs:
        subprocess.run(["make", *suite.needs], cwd=ROOT, check=True)  # noqa: S607 -- of the system
    began, about = time.monotonic(), provenance({})
    code = _code(["bash", "-euc", suite.run], minutes)
    if code is None:
        print(f"{suite.name} was ended after {minutes:g} minutes: neither passed nor failed")
        return 0
    if code == 0 and records:
        done = record_pass(ROOT, suite.name, time.monotonic() - began, about)
        print(f"{suite.name} passed on {done.commit} in {done.seconds:.0f} s")
    return code


def _code(command: Sequence[str], minutes: float | None) -> int | None:
    """Of a command; whatever it started ends with it. None: its time was over."""
    folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    contained = [sys.executable, "-m", "tools.suites.contained", *command]
    with subprocess.Popen(contained, cwd=ROOT, env=environment) as process:
        try:
            return process.wait(None if minutes is None else 60 * minutes)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(_GRACE_SECONDS)
            return None


def _list(known: Sequence[Suite]) -> None:
    passes = last_passes(ROOT)
    for each in known:
        done = passes.get(each.name)
        passed = f" (passed {done.date})" if done is not None else ""
        print(f"{each.name:20} {each.about}{passed}{' (in rotation)' if each.in_ci else ''}")


if __name__ == "__main__":
    main()
