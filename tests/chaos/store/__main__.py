"""`make chaos-store`: kills, freezes, skewed clocks and cuts, and what the store lost by them.

`--quick` divides every count by ten; `--only manager redis` runs some scenarios.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from bench.harness import processes
from bench.report import RESULTS, Report
from tests.chaos.store import clock_skew, failover, freezes, kills
from tests.chaos.store.checker import Verdict
from tests.chaos.store.controls import controls
from tests.chaos.store.rig import Outcome, Setting

__all__ = ["main"]

BENCH = "chaos_store"
_QUICK = 10
_MOST_SECONDS = {
    "recovery_manager_p95_s": 3.0,
    "recovery_redis_p95_s": 5.0,
    "partition_refused_s": 3.0,
}
_NONE = (
    *Verdict.VIOLATIONS,
    "rollouts_given_up",
    "lease_changes_under_skew",
    "sentinel_tokens_lost",
    "partition_tokens_lost",
)

Scenario = Callable[[Setting], Outcome]


def scenarios(divisor: int) -> dict[str, Scenario]:
    """Every scenario by name, with its counts divided by `divisor`."""

    def count(number: int) -> int:
        return max(2, number // divisor)

    return {
        "manager": partial(kills.kill_manager, kills=count(50)),
        "redis": partial(kills.kill_redis, kills=count(50)),
        "large-file": partial(kills.kill_redis_with_large_file, mebibytes=count(1024)),
        "trainer": partial(kills.kill_trainer, kills=count(20)),
        "freeze": partial(freezes.freeze, freezes=count(100)),
        "skew": partial(clock_skew.skew, leases=count(40)),
        "sentinel": partial(failover.kill_master, kills=count(10)),
        "partition": failover.cut_master,
        "controls": run_controls,
    }


def run_controls(setting: Setting) -> Outcome:
    """Every negative control: what it violates is the proof that the checker sees it."""
    failed = []
    for name, control in setting.progress.track(
        controls().items(), description="negative controls"
    ):
        verdict = control(setting.part(name.replace(" ", "-")))
        failed.append(verdict.violations > 0)
        setting.progress.console.print(f"control {name}: {_found(verdict)}")
    figures = {"negative_controls": len(failed), "negative_controls_failed": sum(failed)}
    return Outcome(figures={name: float(count) for name, count in figures.items()})


def run(names: list[str], chosen: dict[str, Scenario], setting: Setting) -> Outcome:
    """One scenario after the other; what they found together."""
    total = Outcome()
    for name in names:
        began = time.monotonic()
        outcome = chosen[name](setting.part(name))
        seconds = time.monotonic() - began
        setting.progress.console.print(f"{name}: {_found(outcome.verdict)}, {seconds:.0f} s")
        total += outcome
    return total


def broken(figures: Mapping[str, float]) -> list[str]:
    """The promises that the figures break, by the name of the figure."""
    failed = [name for name, most in _MOST_SECONDS.items() if figures.get(name, 0.0) > most]
    failed += [name for name in _NONE if figures.get(name, 0.0) > 0]
    if figures.get("negative_controls") != figures.get("negative_controls_failed"):
        failed.append("negative_controls_failed")
    return failed


def main() -> None:
    """Run the scenarios, print and write the figures; exit 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tenth of every count")
    parser.add_argument("--only", nargs="+", choices=list(scenarios(1)), metavar="SCENARIO")
    parser.add_argument("--keep", type=Path, help="new folder for logs and data, kept afterwards")
    given = parser.parse_args()
    chosen = scenarios(_QUICK if given.quick else 1)
    names = given.only or list(chosen)
    console = Console(stderr=True)
    console.print(f"seed {given.seed}: {', '.join(names)}")
    with processes.scratch() as scratch, Progress(console=console) as progress:
        folder = given.keep or Path(scratch)
        outcome = run(names, chosen, Setting(folder=folder, seed=given.seed, progress=progress))
        progress.stop()
        figures = {**asdict(outcome.verdict), **outcome.figures}
        report = Report(bench=BENCH, figures=figures, raw=outcome.raw, seeds=[given.seed])
        # Only the whole is worth keeping.
        whole = names == list(chosen) and not given.quick
        report.publish(RESULTS if whole else folder)
    if failed := broken(figures):
        sys.exit(f"broken: {', '.join(failed)}")


def _found(verdict: Verdict) -> str:
    counts = {name: count for name, count in asdict(verdict).items() if count}
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "no violation"


if __name__ == "__main__":
    main()
