"""`make soak`: the quickstart's loop with lending for an hour, with a fault every 30 seconds.

Each fault is of one process, Redis among them: stopped for up to 20 s, killed, or restarted. After
it, further optimizer steps must be committed. At the end every token that agents received is
compared with the store, every trained sample with the ledger, and the slope of each process's
memory is printed. `--seconds 300` makes a short one, which leaves no result.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import RESULTS, Report, percentile
from tests.chaos.soak.faults import KINDS, FaultySupervisor
from tests.chaos.soak.memory import mib_per_hour, read
from tests.chaos.soak.soak_run import LEAK, SoakRun
from tests.chaos.suite import NOTHING_LOST, broken_limits, exit_if_broken
from tests.lib.end_to_end.quickstart_files import make_quickstart
from tests.suites.mixed.__main__ import CONFIG, run_of

BENCH = "soak"
_SECONDS, _EVERY_SECONDS = 3600.0, 30.0
_RANKER = "\n[ranker]\nwindow_prompts = 512\n"
"""Full within minutes, so that what grows after them is no window."""
_CONTROL_BOUND_SECONDS = 60.0
_ZERO = (
    *NOTHING_LOST,
    "times_stuck",
)
_SHOWN = ("tokens_received_by_agents", "turns", "rollouts", "weight_updates", "node_lendings")
_MAX_MIB_PER_HOUR = 10.0
"""Of each process but Redis, which keeps what is recorded."""


def soak(folder: Path, **settings: Any) -> tuple[SoakRun, dict[str, Any]]:
    """One run in `folder`, and its summary."""
    make_quickstart(folder)
    (folder / "run.toml").write_text(CONFIG + _RANKER)
    plain = run_of(folder, ())
    run = SoakRun(
        plain.config,
        plain.layout,
        plain.plans,
        plain.view,
        supervisor=FaultySupervisor,
        trees=plain.trees,
        changes=(),
        **settings,
    )
    return run, asyncio.run(run.train())


def figures_of(run: SoakRun, summary: dict[str, Any]) -> dict[str, float]:
    """The figures of a run by name."""
    recovered = [each["recovery_seconds"] for each in run.recoveries]
    in_time = [seconds for seconds in recovered if seconds is not None]
    slopes = mib_per_hour(read(run.memory_file))
    leak = slopes.pop(LEAK, 0.0)
    figures: dict[str, float] = {
        "seconds": run.seconds,
        "faults": len(recovered),
        **{f"faults_{kind}": sum(e["kind"] == kind for e in run.recoveries) for kind in KINDS},
        "times_stuck": len(recovered) - len(in_time),
        "recovery_seconds_median": median(in_time),
        "recovery_seconds_p95": percentile(in_time, 0.95),
        "recovery_seconds_max": max(in_time),
        "steps_trained": summary["optimizer_steps"],
        **{name: summary[name] for name in (*_ZERO, *_SHOWN) if name in summary},
        **{f"dead_letters_{why}": number for why, number in summary["dead_letters"].items()},
        **{f"{name}.mib_per_hour": slope for name, slope in slopes.items()},
    }
    others = [slope for name, slope in slopes.items() if name != "redis"]
    figures["most_mib_per_hour_but_redis"] = max(others, default=0.0)
    figures["leak_control.mib_per_hour"] = leak
    return figures


def controls(folder: Path, seed: int, summary: dict[str, Any], leak: float) -> dict[str, int]:
    """A manager that stays stopped is stuck, a changed token is seen, and so is a leak."""
    stuck, _ = soak(
        folder,
        seconds=0.0,
        every_seconds=0.0,
        seed=seed,
        bound_seconds=_CONTROL_BOUND_SECONDS,
        never_thawed="trajectory_manager",
    )
    failed = [
        stuck.recoveries[0]["recovery_seconds"] is None,
        bool(summary["audit_sees"]),
        leak > _MAX_MIB_PER_HOUR,
    ]
    return {"negative_controls": len(failed), "negative_controls_failed": sum(failed)}


def main() -> None:
    """Run it and its controls, print and write the figures; exit 1 if one is above its limit."""
    given = _arguments()
    with tempfile.TemporaryDirectory(prefix="seamflow-soak-", ignore_cleanup_errors=True) as name:
        folder = given.keep or Path(name)
        (folder / "run").mkdir(parents=True)
        (folder / "control").mkdir()
        run, summary = soak(
            folder / "run", seconds=given.seconds, every_seconds=_EVERY_SECONDS, seed=given.seed
        )
        figures = figures_of(run, summary)
        leak = figures["leak_control.mib_per_hour"]
        figures |= controls(folder / "control", given.seed, summary, leak)
        recoveries = [each["recovery_seconds"] or run.bound_seconds for each in run.recoveries]
        raw = {"recovery_seconds": recoveries}
        report = Report(bench=BENCH, figures=figures, raw=raw, seeds=[given.seed])
        report.publish(RESULTS if given.seconds == _SECONDS else folder)
    limits = {"most_mib_per_hour_but_redis": _MAX_MIB_PER_HOUR}
    exit_if_broken(broken_limits(figures, limits, _ZERO))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="how long faults go on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="new folder for logs and data, kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
