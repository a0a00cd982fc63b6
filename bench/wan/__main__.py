"""`make bench-wan`: what crosses a slow link, and what cuts of it cost; needs root.

publish: copies of the weights. The weights service and some rollout servers are on one side, others
on the other one. Each case is measured with and without zones; the engines are fakes.

training: a run with generation on one side and training on the other, in Echo's asynchronous mode:
its speed, and what is lost while the link is cut. on_policy: the same in Echo's sequential mode.

The link is emulated in user space; services, servers and TCP are real.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, replace
from tempfile import TemporaryDirectory
from typing import Any

from bench.report import Report
from bench.wan.publish_over_link import NUM_BYTES, Case
from bench.wan.slow_link import NAMESPACES, SlowLink
from bench.wan.train_over_link import Schedule, figures

_PARTS = ("publish", "training", "on_policy")
_ON_POLICY = Schedule(mode="sequential_pull", rounds=3, cuts=2, flaps=0)
_QUICK: dict[str, Any] = {"rounds": 1, "stretch_steps": 3, "long_cut": 20.0, "cuts": 2, "flaps": 4}
"""What is shorter where no result is recorded."""
_ROUND_TRIP_MS, _MEGABITS = 60.0, 100.0
_CASES = (
    Case(west=2, east=14, zones=True),
    Case(west=2, east=14, zones=True, kill_leader=True),
    Case(west=2, east=14, zones=False),
    Case(west=8, east=8, zones=True),
    Case(west=8, east=8, zones=False),
)


def main() -> None:
    """Measure the parts that are asked for, and report each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--seed", type=int, default=0, help="of the lengths of cuts")
    parser.add_argument("--quick", action="store_true", help="try it: runs, with fake engines")
    given = parser.parse_args()
    if "publish" in given.parts and not given.quick:
        Report(bench="wan", figures=_published(), packages=("grpcio",)).publish()
    if "training" in given.parts:
        _train("wan_training", Schedule(), given.seed, is_quick=given.quick)
    if "on_policy" in given.parts:
        _train("wan_on_policy", _ON_POLICY, given.seed, is_quick=given.quick)


def _train(bench: str, schedule: Schedule, seed: int, *, is_quick: bool) -> None:
    shorter = replace(schedule, **_QUICK) if is_quick else schedule
    found = Report(bench=bench, figures=figures(shorter, seed, is_quick=is_quick), seeds=[seed])
    if is_quick:
        found.show()
    else:
        found.publish()


def _published() -> dict[str, float]:
    found: dict[str, float] = {}
    for case in _CASES:
        found |= {f"{name}_{case.name}": value for name, value in _measured(case).items()}
    most = max(found[f"copies_{each.name}"] for each in _CASES if each.zones)
    return found | {"copies_per_zone": most}


def _measured(case: Case) -> dict[str, float]:
    link = SlowLink(round_trip_ms=_ROUND_TRIP_MS, megabits=_MEGABITS, queue_ms=120.0)
    with link.open(), TemporaryDirectory(prefix="seamflow-wan-") as folder:
        command = [sys.executable, "-m", "bench.wan.publish_over_link"]
        inside = ["ip", "netns", "exec", NAMESPACES[0], *command, json.dumps(asdict(case)), folder]
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
