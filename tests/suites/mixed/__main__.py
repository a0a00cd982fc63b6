"""`make test-mixed`: training goes on while services are changed for those of another release.

A small run trains under load. Each process in turn is stopped and started from the release's own
source, and back; then all processes are rolled back one after the other in any order, and forward
again. After each change it must serve, and further optimizer steps must be committed. At the end
every token that agents received is compared with the store, and every trained sample with the
ledger. As a control, a release whose trainer does not know a checkpoint's field must fail.

`--release REF` names the other release; `--only trainer weights` changes some processes.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from seamflow.release import __version__

from bench.report import RESULTS, Report
from services.chassis.errors import StartupError
from services.launcher import redis_server
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout, free_ports
from services.launcher.process_plan import plan
from services.launcher.report.view import View
from tests.chaos.suite import NOTHING_LOST, broken_limits, exit_if_broken
from tests.lib.end_to_end.quickstart_files import make_quickstart
from tests.suites.mixed.changes import UPGRADE_ORDER, Change, changes
from tests.suites.mixed.mixed_run import MAX_STALENESS, ChangeError, MixedRun
from tests.suites.mixed.source_tree import ROOT, SourceTree, changed_requirements, export

BENCH = "mixed"
CONFIG = """
[trainer]
num_steps = 1000000

[trainer.optimizer]
learning_rate = 1e-3

[rollout_server]
max_running = 8
max_context = 256

[scheduler]
lending = "always"

[dataloader]
epochs = 0
"""
_ZERO = (
    *NOTHING_LOST,
    "process_restarts",
)
_SHOWN = ("tokens_received_by_agents", "turns", "rollouts", "weight_updates", "node_lendings")
_BROKEN = "Checkpoint got an unexpected field"
_PARSER = re.compile(r"( +)return Checkpoint\(\*\*\{k: v for k, v in record.items\(\).*\n")


def mixed(folder: Path, plan_of_changes: Sequence[Change], seed: int) -> dict[str, Any]:
    """One run with these changes; its summary and `seconds`, by change.

    Raises:
        ChangeError: training did not go on after a change.
    """
    make_quickstart(folder)
    (folder / "run.toml").write_text(CONFIG)
    run = run_of(folder, plan_of_changes, seed)
    try:
        summary = asyncio.run(run.train())
    except StartupError as error:
        raise ChangeError(f"after {run.current or 'the start'}: {error}") from error
    return {**summary, "seconds": run.done}


def run_of(
    folder: Path, plan_of_changes: Sequence[Change], seed: int = 0, **settings: object
) -> MixedRun:
    """The run in `folder`, not started; every process from this tree at first.

    `settings` of the launcher take the place of the usual ones.
    """
    config = _config(folder, seed).replace(**settings)
    ports = free_ports(config)
    layout = Layout(
        folder=folder,
        run_id=config.name,
        config_file=folder / "run.toml",
        ports=ports,
        redis_url=f"redis://127.0.0.1:{ports['redis']}",
    )
    plans = plan(config, layout)
    trees = dict.fromkeys(plans, SourceTree(name="present", root=ROOT))
    plans = {"redis": redis_server.server_plan(config, folder, ports["redis"]), **plans}
    return MixedRun(config, layout, plans, View(), trees=trees, changes=plan_of_changes)


def _config(folder: Path, seed: int) -> LauncherConfig:
    return LauncherConfig(
        name="mixed",
        console=False,  # the other release has none, and no process depends on it
        runs_folder=str(folder),
        token_audit=True,
        model=str(folder / "model"),
        reference=str(folder / "model"),
        ranker=True,
        tasks=str(folder / "tasks.jsonl"),
        agent="examples.quickstart.agent:ElevatorAgent",
        # Two rollout servers: one is changed while the other serves.
        nodes=("node-a: rollout", "node-b: rollout train"),
        concurrency=8,
        group_size=2,
        groups_per_step=4,
        max_staleness=MAX_STALENESS,
        lease_seconds=20,
        seed=seed,
    )


def broken_release(folder: Path) -> SourceTree:
    """This tree, but its trainer does not know a field of checkpoints, and does not ignore it."""
    shutil.copytree(
        ROOT,
        folder,
        ignore=shutil.ignore_patterns(".*", "runs", "bench", "tests", "__pycache__"),
    )
    file = folder / "trainer" / "checkpoint" / "checkpoint_files.py"
    strict = rf"\1raise TypeError('{_BROKEN}')\n"
    text, number = _PARSER.subn(strict, file.read_text(encoding="utf-8"))
    if number != 1:
        raise RuntimeError(f"{file} reads checkpoints in another way now: break that one")
    file.write_text(text, encoding="utf-8")
    return SourceTree(name="broken-release", root=folder)


def control(folder: Path, seed: int) -> int:
    """1 if a release that cannot read a checkpoint is found, by the name of its trainer."""
    broken = broken_release(folder / "tree")
    broken.check()
    change = Change(phase="control", process="trainer", tree=broken)
    try:
        mixed(folder, [change], seed)
    except ChangeError as error:
        print(f"control: {error}", file=sys.stderr)
        return int("trainer from broken-release" in str(error) and _BROKEN in str(error))
    return 0


def figures_of(summary: dict[str, Any], *, changed: int, seconds: float) -> dict[str, float]:
    """The figures of a run by name."""
    return {
        "pairs_tried": changed,
        "steps_trained": summary["optimizer_steps"],
        **{name: summary[name] for name in (*_ZERO, *_SHOWN, "samples_trained")},
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Make all changes and the control, print and write the figures; exit 1 if one failed."""
    given = _arguments()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seamflow-mixed-", ignore_cleanup_errors=True) as name:
        folder = given.keep or Path(name)
        try:
            old = export(given.release, folder / "release")
            old.check()
        except ValueError as error:
            sys.exit(f"test-mixed: {error}")
        _announce(old)
        chosen = list(changes(given.only, old, SourceTree(name="present", root=ROOT), given.seed))
        (folder / "run").mkdir()
        (folder / "control").mkdir()
        try:
            summary = mixed(folder / "run", chosen, given.seed)
        except ChangeError as error:
            sys.exit(f"test-mixed: {error}")
        figures = figures_of(summary, changed=len(chosen), seconds=time.monotonic() - began)
        figures["negative_controls"] = 1
        figures["negative_controls_failed"] = control(folder / "control", given.seed)
        raw = {"seconds_of_change": summary["seconds"]}
        complete = list(given.only) == list(UPGRADE_ORDER)
        report = Report(bench=BENCH, figures=figures, raw=raw, seeds=[given.seed])
        report.publish(RESULTS if complete else folder)
    exit_if_broken(broken_limits(figures, {}, _ZERO))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", required=True, help="git tag or commit of the other side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=UPGRADE_ORDER, default=UPGRADE_ORDER)
    parser.add_argument("--keep", type=Path, help="new folder for logs and data, kept")
    return parser.parse_args()


def _announce(old: SourceTree) -> None:
    console = Console(stderr=True)
    console.print(f"release {old.name} next to {__version__}, on this environment's packages")
    if differing := changed_requirements(old.root):
        console.print("requirements that differ from the release's:", *differing, sep="\n  ")


if __name__ == "__main__":
    main()
