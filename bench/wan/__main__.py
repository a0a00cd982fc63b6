"""`make bench-wan`: copies of the weights that cross a slow link; needs root.

The weights service and some rollout servers are on one side, others on the other one. Each case is
measured with and without zones. The link is emulated in user space, the engines are fakes; servers,
service and TCP are real.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from tempfile import TemporaryDirectory

from bench.report import Report
from bench.wan.publish_over_link import NUM_BYTES, Case
from bench.wan.slow_link import SlowLink

__all__ = ["main"]

_NAMES = ("sf-wan-west", "sf-wan-east")
_ROUND_TRIP_MS, _MEGABITS = 60.0, 100.0
_CASES = (
    Case(west=2, east=14, zones=True),
    Case(west=2, east=14, zones=True, kill_leader=True),
    Case(west=2, east=14, zones=False),
    Case(west=8, east=8, zones=True),
    Case(west=8, east=8, zones=False),
)


def main() -> None:
    """Measure all cases, and report."""
    figures: dict[str, float] = {}
    for case in _CASES:
        figures |= {f"{name}_{case.name}": value for name, value in _measured(case).items()}
    figures["copies_per_zone"] = max(
        figures[f"copies_{each.name}"] for each in _CASES if each.zones
    )
    Report(bench="wan", figures=figures, packages=("grpcio",)).publish()


def _measured(case: Case) -> dict[str, float]:
    link = SlowLink(_NAMES, round_trip_ms=_ROUND_TRIP_MS, megabits=_MEGABITS, queue_ms=120.0)
    with link.open(), TemporaryDirectory(prefix="seamflow-wan-") as folder:
        command = [sys.executable, "-m", "bench.wan.publish_over_link"]
        inside = ["ip", "netns", "exec", _NAMES[0], *command, json.dumps(asdict(case)), folder]
        process = subprocess.Popen(inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit(f"the servers of {case.name} did not start")
        before = link.sent_bytes[0]
        process.stdin.write("publish\n")
        process.stdin.flush()
        found: dict[str, float] = json.loads(process.stdout.readline())
        copies = (link.sent_bytes[0] - before) / NUM_BYTES
        process.stdin.close()
        process.wait()
    ideal = NUM_BYTES * 8 / (_MEGABITS * 1e6) + 8 * _ROUND_TRIP_MS / 1000
    print(f"{case.name}: {copies:.3f} copies, {found['seconds']:.1f} s", file=sys.stderr)
    return {"copies": copies, "seconds_over_ideal": found["seconds"] / ideal}


if __name__ == "__main__":
    main()
