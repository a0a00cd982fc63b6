"""`make chaos-restarts`: training goes on while each process in turn is ended and started again.

A small run trains under load with a `durable` store. Redis and every process are ended by SIGTERM
and by SIGKILL, in a drawn order, and started again; a second run does the same to the processes of
an environment. Nothing else restarts them: a process that ends because another one did is counted.
At the end every token that agents received is compared with the store, and every trained sample
with the ledger.

Controls: a Redis that keeps nothing on disk must be noticed, and so must the errors of an agent
runner that does not resume turns.

`--terms 1 --kills 0` changes how often each process gets each signal, `--only redis weights` which.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.report import RESULTS, Report, percentile
from services.chassis.errors import StartupError
from services.launcher.child_process import ProcessPlan
from tests.chaos.restarts.restart_run import Outcome, RestartRun
from tests.chaos.restarts.restarts import Restart, restarts
from tests.chaos.restarts.signalled import SignalledSupervisor
from tests.chaos.restarts.watching_agent import ERRORS_FILE
from tests.chaos.suite import NOTHING_LOST, broken_limits, exit_if_broken
from tests.lib.end_to_end.quickstart_files import make_quickstart
from tests.suites.mixed.__main__ import CONFIG, run_of
from tests.suites.mixed.changes import UPGRADE_ORDER
from tests.suites.mixed.mixed_run import ChangeError

BENCH = "chaos-restarts"
OF_AGENT = ("redis", *UPGRADE_ORDER)
OF_ENVIRONMENT = ("environment_server-0", "environments-0", "http_gateway-0")
"""The processes that a run with an environment has instead of an agent runner."""
_TERMS, _KILLS = 2, 1
_CONTROL_BOUND_SECONDS = 60.0
_AGENT = "tests.chaos.restarts.watching_agent:WatchingAgent"
_IMPATIENT = "tests.chaos.restarts.impatient_runner"
ENVIRONMENT: Mapping[str, object] = {
    "agent": None,
    "environment": "examples.guess_number:GuessNumber",
    "tasks": None,
    "ranker": False,
    "reference": None,
    "http_gateways": 1,
}
_FORGETFUL = ("--appendonly", "no")
ZERO = (
    *NOTHING_LOST,
    "errors_seen_by_agents",
    "drains_unclean",
    "process_restarts",
    "tracebacks",
)
LIMITS = {"drain_seconds_max": 30.0, "seconds_to_step_max": 30.0}
_SUMMED = (*ZERO[:7], "process_restarts", "tracebacks", "optimizer_steps", "turns", "rollouts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One run, after it has ended."""

    summary: Mapping[str, Any]
    outcomes: Sequence[Outcome]
    errors: Sequence[str]
    """What agents saw."""


def drill(run: RestartRun) -> Drill:
    """Train through all restarts.

    Raises:
        ChangeError: training did not go on after one.
    """
    try:
        summary = asyncio.run(run.train())
    except StartupError as error:
        raise ChangeError(f"after {run.current or 'the start'}: {error}") from error
    errors = _errors_file(run.layout.folder)
    seen = errors.read_text().splitlines() if errors.exists() else []
    return Drill(summary=summary, outcomes=run.outcomes, errors=seen)


def run_with(folder: Path, made: Sequence[Restart], seed: int, **settings: object) -> RestartRun:
    """The run in `folder`, not started."""
    folder.mkdir()
    make_quickstart(folder)
    (folder / "run.toml").write_text(CONFIG)
    usual: Mapping[str, object] = {"durability": "durable", "agent": _AGENT}
    plain = run_of(folder, made, seed, **{**usual, **settings})
    plans = {name: _watched(plan, folder) for name, plan in plain.plans.items()}
    return RestartRun(
        plain.config,
        plain.layout,
        plans,
        plain.view,
        supervisor=SignalledSupervisor,
        trees=plain.trees,
        changes=made,
    )


def _watched(plan: ProcessPlan, folder: Path) -> ProcessPlan:
    if plan.name != "agent_runner":
        return plan
    errors = {ERRORS_FILE: str(_errors_file(folder))}
    return replace(plan, environment={**plan.environment, **errors})


def _errors_file(folder: Path) -> Path:
    return folder / "errors.txt"


def figures_of(drills: Sequence[Drill]) -> dict[str, float]:
    """The figures of all runs together, by name."""
    outcomes = [outcome for each in drills for outcome in each.outcomes]
    drains = [each for each in outcomes if each.signal == signal.SIGTERM]
    figures: dict[str, float] = {
        "restarts_by_sigterm": len(drains),
        "restarts_by_sigkill": len(outcomes) - len(drains),
        "drains_unclean": sum(not each.drained for each in drains),
        "errors_seen_by_agents": sum(len(each.errors) for each in drills),
        **{name: sum(each.summary[name] or 0 for each in drills) for name in _SUMMED},
    }
    if drains:
        figures["drain_seconds_max"] = max(each.end.seconds for each in drains)
    for name in sorted({each.process for each in outcomes}):
        of_it = [each.seconds_to_step for each in outcomes if each.process == name]
        figures[f"{name}.seconds_to_step_max"] = max(of_it)
    waits = [each.seconds_to_step for each in outcomes]
    figures["seconds_to_step_p95"] = percentile(waits, 0.95)
    figures["seconds_to_step_max"] = max(waits)
    return figures


def controls(folder: Path, seed: int) -> int:
    """How many of the two were noticed."""
    return _forgetful_redis(folder / "forgetful", seed) + _impatient(folder / "impatient", seed)


def _forgetful_redis(folder: Path, seed: int) -> int:
    """1 if a store that is empty after its SIGKILL is noticed: training does not go on."""
    run = run_with(
        folder, restarts(["redis"], terms=0, kills=1, seed=seed), seed, durability="fast"
    )
    redis = run.plans["redis"]
    run.plans["redis"] = replace(redis, command=(*redis.command, *_FORGETFUL))
    run.bound_seconds = _CONTROL_BOUND_SECONDS
    try:
        drill(run)
    except ChangeError as error:
        print(f"control: {error}", file=sys.stderr)
        return int("redis by SIGKILL" in str(error))
    return 0


def _impatient(folder: Path, seed: int) -> int:
    """1 if the errors of an agent runner that does not resume turns are counted."""
    made = restarts(["rollout_gateway"], terms=0, kills=3, seed=seed)
    run = run_with(folder, made, seed)
    runner = run.plans["agent_runner"]
    command = (*runner.command[:-1], _IMPATIENT)
    run.plans["agent_runner"] = replace(runner, command=command)
    done = drill(run)
    print(f"control: {len(done.errors)} errors, such as {done.errors[:1]}", file=sys.stderr)
    return int(len(done.errors) > 0)


def main() -> None:
    """Do all restarts and the controls, print and write the figures; exit 1 if one is broken."""
    given = _arguments()
    with tempfile.TemporaryDirectory(prefix="seamflow-restarts-", ignore_cleanup_errors=True) as to:
        folder = given.keep or Path(to)
        folder.mkdir(exist_ok=True)
        try:
            drills = _drills(given, folder)
        except ChangeError as error:
            sys.exit(f"chaos-restarts: {error}")
        figures = figures_of(drills)
        figures["negative_controls"] = 2
        figures["negative_controls_failed"] = controls(folder, given.seed)
        raw = _raw(drills)
        full = (given.terms, given.kills, given.only) == (_TERMS, _KILLS, None)
        report = Report(bench=BENCH, figures=figures, raw=raw, seeds=[given.seed])
        report.publish(RESULTS if full else folder)
    for each in (line for done in drills for line in done.errors):
        print(each, file=sys.stderr)
    exit_if_broken(broken_limits(figures, LIMITS, ZERO))


def _drills(given: argparse.Namespace, folder: Path) -> list[Drill]:
    """A run with an agent and one with an environment, as far as their processes are chosen."""
    counts = {"terms": given.terms, "kills": given.kills, "seed": given.seed}
    only = given.only or (*OF_AGENT, *OF_ENVIRONMENT)
    chosen: list[tuple[str, Sequence[str], Mapping[str, object]]] = [
        ("agent", OF_AGENT, {}),
        ("environment", OF_ENVIRONMENT, ENVIRONMENT),
    ]
    done = []
    for name, processes, settings in chosen:
        if made := restarts([each for each in processes if each in only], **counts):
            done.append(drill(run_with(folder / name, made, given.seed, **settings)))
    return done


def _raw(drills: Sequence[Drill]) -> dict[str, list[float]]:
    """Seconds of each restart, by process and signal."""
    raw: dict[str, list[float]] = {}
    for each in (outcome for done in drills for outcome in done.outcomes):
        name = f"{each.process}.{each.signal.name.lower()}"
        raw.setdefault(f"{name}.seconds_to_end", []).append(each.end.seconds)
        raw.setdefault(f"{name}.seconds_to_serve", []).append(each.seconds_to_serve)
        raw.setdefault(f"{name}.seconds_to_step", []).append(each.seconds_to_step)
    return raw


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--terms", type=int, default=_TERMS, help="SIGTERMs of each process")
    parser.add_argument("--kills", type=int, default=_KILLS, help="SIGKILLs of each process")
    parser.add_argument("--only", nargs="+", choices=[*OF_AGENT, *OF_ENVIRONMENT])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="new folder for logs and data, kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
