"""`make chaos-store`: kills, freezes, skewed clocks and cuts, and what the store lost by them.

`--quick` divides every count by ten; `--only manager redis` runs some scenarios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

from bench.report import Report
from tests.chaos.store import clock_skew, failover, freezes, kills
from tests.chaos.store.checker import Verdict
from tests.chaos.store.controls import controls
from tests.chaos.store.rig import Outcome, Setting
from tests.chaos.suite import Suite, broken_limits, exit_if_broken

BENCH = "chaos_store"
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


def run(names: Sequence[str], chosen: Mapping[str, Scenario], setting: Setting) -> Outcome:
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
    """The limits that the figures break, by name."""
    return broken_limits(figures, _MOST_SECONDS, _NONE)


def main() -> None:
    """Run the scenarios, print and write the figures; exit 1 if a limit is broken."""
    suite = Suite[Scenario].from_arguments(__doc__, scenarios)
    with suite.setting() as setting:
        outcome = run(suite.names, suite.chosen, setting)
        folder = suite.report_folder(setting)
        figures = {**asdict(outcome.verdict), **outcome.figures}
        Report(bench=BENCH, figures=figures, raw=outcome.raw, seeds=[suite.seed]).publish(folder)
    exit_if_broken(broken(figures))


def _found(verdict: Verdict) -> str:
    counts = {name: count for name, count in asdict(verdict).items() if count}
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "no violation"


if __name__ == "__main__":
    main()
