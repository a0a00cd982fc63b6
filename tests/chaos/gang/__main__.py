"""`make chaos-gang`: a trainer of two nodes and a spare, whose nodes are lent, returned and killed.

200 lendings, returns and kills of real processes: a trainer's ranks on a node, its node agent, or
all of the node's processes, which a spare then replaces. Meanwhile it is looked whether a rollout
server has the device of a rank that trains. As a control, a trainer that counts its nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import RESULTS, Report
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout, free_ports
from services.launcher.process_plan import plan
from services.launcher.redis_server import server_plan
from services.launcher.report.view import View
from tests.chaos.gang.gang_run import GangRun, NodeKiller
from tests.chaos.suite import NOTHING_LOST, broken_limits, exit_if_broken
from tests.lib.end_to_end.quickstart_files import make_quickstart
from tests.suites.mixed.__main__ import CONFIG
from tests.suites.mixed.mixed_run import MAX_STALENESS
from tests.suites.mixed.source_tree import ROOT, SourceTree

BENCH = "chaos_gang"
_EVENTS, _CONTROL_EVENTS = 200, 60
_BOUND_SECONDS = 300.0
_ZERO = (
    "ranks_training_without_device",
    *NOTHING_LOST,
)


def gang_run(folder: Path, num_events: int, seed: int, *, counting: bool = False) -> GangRun:
    """The run in `folder`, not started; `counting`: with the control's trainer, without kills."""
    make_quickstart(folder)
    (folder / "run.toml").write_text(CONFIG)
    config = _config(folder, seed)
    ports = free_ports(config)
    layout = Layout(
        folder=folder,
        run_id=config.name,
        config_file=folder / "run.toml",
        ports=ports,
        redis_url=f"redis://127.0.0.1:{ports['redis']}",
    )
    plans = plan(config, layout)
    if counting:
        plans = {name: _counting(each) for name, each in plans.items()}
    return GangRun(
        config,
        layout,
        {"redis": server_plan(config, folder, ports["redis"]), **plans},
        View(),
        supervisor=NodeKiller,
        trees=dict.fromkeys(plans, SourceTree(name="present", root=ROOT)),
        changes=(),
        bound_seconds=_BOUND_SECONDS,
        num_events=num_events,
        seed=seed,
        kills_nodes=not counting,
    )


def _config(folder: Path, seed: int) -> LauncherConfig:
    train = tuple(f"node-{name}: rollout train" for name in "bcd")
    return LauncherConfig(
        name="gang",
        runs_folder=str(folder),
        token_audit=True,
        model=str(folder / "model"),
        tasks=str(folder / "tasks.jsonl"),
        agent="examples.quickstart.agent:ElevatorAgent",
        nodes=("node-a: rollout", *train),
        trainer_nodes=2,
        concurrency=8,
        group_size=2,
        groups_per_step=4,
        max_staleness=MAX_STALENESS,
        lease_seconds=20,
        seed=seed,
    )


def _counting(process: ProcessPlan) -> ProcessPlan:
    """The same process; a trainer by the old rule."""
    if not process.name.startswith("trainer-"):
        return process
    module = "tests.chaos.gang.counting_trainer"
    command = tuple(module if part == "trainer" else part for part in process.command)
    return replace(process, command=command)


def figures_of(run: GangRun, summary: dict[str, Any]) -> dict[str, float]:
    """The figures of a run by name."""
    return {
        "ranks_training_without_device": run.num_without_device,
        "looks_while_training": run.num_looks,
        "node_lendings": summary["node_lendings"],
        "node_returns": summary["node_returns"],
        **{f"kills_{what}": number for what, number in sorted(run.kills.items())},
        "placements_of_ranks": len(run.placements),
        "recovery_seconds_median": median(run.recovery_seconds),
        "recovery_seconds_max": max(run.recovery_seconds),
        "steps_trained": summary["optimizer_steps"],
        **{name: summary[name] for name in _ZERO if name in summary},
    }


def main() -> None:
    """Run it and its control, print and write the figures; exit 1 if one is above its limit."""
    given = _arguments()
    with tempfile.TemporaryDirectory(prefix="seamflow-gang-", ignore_cleanup_errors=True) as name:
        folder = given.keep or Path(name)
        for part in ("run", "control"):
            (folder / part).mkdir(parents=True)
        control = gang_run(folder / "control", _CONTROL_EVENTS, given.seed, counting=True)
        asyncio.run(control.train())
        run = gang_run(folder / "run", given.events, given.seed)
        figures = figures_of(run, asyncio.run(run.train()))
        figures["control.ranks_training_without_device"] = control.num_without_device
        figures["control.looks_while_training"] = control.num_looks
        figures["negative_controls"] = 1
        figures["negative_controls_failed"] = int(control.num_without_device > 0)
        raw = {"recovery_seconds": run.recovery_seconds}
        report = Report(bench=BENCH, figures=figures, raw=raw, seeds=[given.seed])
        report.publish(RESULTS if given.events == _EVENTS else folder)
    exit_if_broken(broken_limits(figures, {}, _ZERO))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=_EVENTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="new folder for logs and data, kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
