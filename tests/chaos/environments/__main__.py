"""`make chaos-environments`: environments that are killed, stuck and slow, and what they cost.

`--quick` divides every count by ten; `--only killed hung` runs some scenarios.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

from bench.report import Report
from tests.chaos.environments.rig import Disturbance, RunResult, run
from tests.chaos.store.rig import Setting
from tests.chaos.suite import Suite, broken_limits, exit_if_broken

BENCH = "chaos-environments"
UNDISTURBED = ("undisturbed", "undisturbed-again")
"""Before and after the others: the load of the machine changes."""
CONTROL = "control"
_CONTROL = Disturbance(kills=4, module="tests.chaos.environments.zero_on_failure")
_CONTROL_TASKS = 40


def scenarios(divisor: int) -> dict[str, tuple[Disturbance, int]]:
    """What goes wrong in each run, and its number of groups."""
    count, tasks = max(2, 20 // divisor), max(12, 240 // divisor)
    return {
        UNDISTURBED[0]: (Disturbance(), tasks),
        "killed": (Disturbance(kills=count), tasks),
        "hung": (Disturbance(hangs=count), tasks),
        "slow": (Disturbance(slow=True), tasks),
        "all": (Disturbance(kills=count, hangs=count, slow=True, every_seconds=0.75), tasks),
        UNDISTURBED[1]: (Disturbance(), tasks),
        CONTROL: (_CONTROL, _CONTROL_TASKS),
    }


def figures_of(results: Mapping[str, RunResult]) -> dict[str, float]:
    """Sums over the runs, and of each its throughput beside the undisturbed ones'."""
    runs = {name: result for name, result in results.items() if name != CONTROL}
    verdicts = [result.verdict for result in runs.values()]
    figures: dict[str, float] = {
        "rewards_from_failures": sum(each.rewards_from_failures for each in verdicts),
        "groups_lost": sum(each.groups_lost for each in verdicts),
        "rollouts_finished": sum(each.rollouts_finished for each in verdicts),
        "kills": sum(result.num_kills for result in runs.values()),
        "hangs": sum(result.num_hangs for result in runs.values()),
    }
    for verdict in verdicts:
        for kind, number in verdict.failures.items():
            name = f"failures_{kind.lower()}"
            figures[name] = figures.get(name, 0) + number
    rates = {name: result.rollouts_per_second for name, result in runs.items()}
    reference = [rates[name] for name in UNDISTURBED if name in rates]
    for name, rate in rates.items():
        figures[f"{name}.rollouts_per_second"] = rate
        if reference and name not in UNDISTURBED:
            figures[f"{name}.throughput_ratio"] = rate / fmean(reference)
    if CONTROL in results:
        figures["negative_controls"] = 1
        caught = results[CONTROL].verdict.rewards_from_failures > 0
        figures["negative_controls_failed"] = int(caught)
    return figures


def broken(figures: Mapping[str, float]) -> list[str]:
    """The limits that the figures break, by name."""
    return broken_limits(figures, {}, ("rewards_from_failures", "groups_lost"))


def run_all(
    names: Sequence[str], chosen: Mapping[str, tuple[Disturbance, int]], setting: Setting
) -> dict[str, RunResult]:
    """One run after the other."""
    results = {}
    for name in names:
        disturbance, num_tasks = chosen[name]
        bar = setting.progress.add_task(name, total=disturbance.kills + disturbance.hangs or None)
        folder = setting.folder / name
        advance = partial(setting.progress.advance, bar)
        result = asyncio.run(run(folder, disturbance, num_tasks, setting.seed, advance))
        setting.progress.console.print(
            f"{name}: {result.verdict}, {result.rollouts_per_second:.1f} rollouts/s"
        )
        results[name] = result
    return results


def main() -> None:
    """Run the scenarios, print and write the figures; exit 1 if a limit is broken."""
    suite = Suite[tuple[Disturbance, int]].from_arguments(__doc__, scenarios)
    with suite.setting() as setting:
        results = run_all(suite.names, suite.chosen, setting)
        folder = suite.report_folder(setting)
        figures = figures_of(results)
        raw = {
            f"{name}.rollouts_per_second": [result.rollouts_per_second]
            for name, result in results.items()
        }
        Report(bench=BENCH, figures=figures, raw=raw, seeds=[suite.seed]).publish(folder)
    exit_if_broken(broken(figures))


if __name__ == "__main__":
    main()
