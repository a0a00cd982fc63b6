"""`make bench-lag`: what the quickstart learns from samples that are older and older.

A condition bounds how many published versions a sample may be behind, and either corrects for what
was learned since (`importance` is truncate) or takes no notice of it (none). At a bound of 0 there
is nothing to correct.

Samples only get as old as their bound where generation runs ahead, so the trainer is held back, in
every condition alike: its algorithm is `HeldBack`. What lag came of it is measured, step by step;
it is less than the bound on average, for nothing is older than the run. The success of training
tasks is that of the step's samples: it is seen as late as they are old, even if nothing is lost.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table
from seamflow.inspect.run_files import read_steps

from bench.quickstart import seeds
from bench.quickstart.modes import WINDOW
from bench.report import RESULTS, Report
from trainer.algorithms.base import LossTerms, PolicyTokens
from trainer.algorithms.critic_free import dapo
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.config import TrainerConfig

HELD_SECONDS = 1.5
"""Sleep before the loss of a micro-batch; a step of the quickstart is one, and two nodes on two
cores generate it in about one second."""
_COLUMNS = ("condition", "lag", "held-out after", "deviation", "lowest", "highest", "training")
_LINES = ((True, "with correction", "#4c9be8"), (False, "without correction", "#e58b3a"))


class HeldBack(PolicyGradient):
    """DAPO with a delay before each loss, during which it uses no core."""

    def __init__(self, config: TrainerConfig) -> None:
        """As `dapo` would be configured, `importance` included."""
        vars(self).update(vars(dapo(config)))

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        """DAPO's."""
        time.sleep(HELD_SECONDS)
        return super().loss(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What runs differ by."""

    bound: int
    """Most versions that a trained sample is behind."""
    corrected: bool
    """Whether a token weighs by its ratio, and is clipped by it."""

    @property
    def name(self) -> str:
        """In figures and folders."""
        if self.bound == 0:
            return "on_policy"
        return f"lag{self.bound}_{'corrected' if self.corrected else 'uncorrected'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run."""

    heldout: float
    """Share of the held-out tasks that it solves after training."""
    success: Sequence[float]
    """Share of each optimizer step's rollouts."""
    lag: float
    """Versions that the oldest sample of a step was behind; mean over steps."""
    token_lag: float
    """Versions that a token of a step was behind; mean over steps."""


Runs = Mapping[Condition, Sequence[Outcome]]
"""By condition, a run for each seed, in the same order."""


def main() -> None:
    """Run, draw, report."""
    given = _arguments()
    runs = _measure(given)
    _print(runs)
    found = figures(runs) | {
        "held_seconds": HELD_SECONDS,
        "learning_rate": given.learning_rate,
        "optimizer_steps": float(given.steps),
    }
    Report(bench="lag", figures=found, raw=raw(runs), seeds=given.seeds).publish()
    draw(RESULTS / "lag.png", runs)


def conditions(bounds: Sequence[int]) -> list[Condition]:
    """Each bound with and without correction, the least first; 0 only once."""
    return [
        Condition(bound=bound, corrected=corrected)
        for bound in sorted(set(bounds))
        for corrected in ((True, False) if bound else (True,))
    ]


def in_turn(every: Sequence[Condition], place: int, rounds: int) -> list[Condition]:
    """The order in round `place` of `rounds`, 0 being the first: none is always last."""
    shift = place * len(every) // rounds
    return [*every[shift:], *every[:shift]]


def settings(condition: Condition, *, steps: int, learning_rate: float) -> dict[str, str]:
    """Settings of a run of the condition, as SEAMFLOW_<TABLE>_<NAME>."""
    return {
        "SEAMFLOW_LAUNCHER_MAX_STALENESS": str(condition.bound),
        "SEAMFLOW_TRAINER_ALGORITHM__IMPORTANCE": "truncate" if condition.corrected else "none",
        "SEAMFLOW_TRAINER_ALGORITHM__NAME": "bench.quickstart.lag:HeldBack",
        "SEAMFLOW_TRAINER_NUM_STEPS": str(steps),
        "SEAMFLOW_TRAINER_OPTIMIZER__LEARNING_RATE": str(learning_rate),
    }


def outcome(summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Outcome:
    """How a run went, by its summary and the trainer's lines."""
    return Outcome(
        heldout=summary["heldout_after"],
        success=[step["reward/success"] for step in steps],
        lag=fmean(step["max_staleness"] for step in steps),
        token_lag=fmean(step["staleness_mean"] for step in steps),
    )


def raw(runs: Runs) -> dict[str, list[float]]:
    """The samples of each figure, one for each seed."""
    found: dict[str, list[float]] = {}
    for condition, many in runs.items():
        found |= {
            f"{condition.name}.heldout_after": [each.heldout for each in many],
            f"{condition.name}.success": [fmean(each.success) for each in many],
            f"{condition.name}.lag": [each.lag for each in many],
            f"{condition.name}.token_lag": [each.token_lag for each in many],
        }
    return found


def figures(runs: Runs) -> dict[str, float]:
    """What the claim is judged by, then means; with one seed alone nothing has a deviation."""
    samples = raw(runs)
    found = _claim(samples) | {name: fmean(values) for name, values in samples.items()}
    for name, values in samples.items():
        if name.endswith(".heldout_after") and len(values) > 1:
            found[f"{name}_deviation"] = stdev(values)
    return found


def curve(many: Sequence[Outcome]) -> list[float]:
    """Success by optimizer step: the mean over runs, and over the newest `WINDOW` steps."""
    mean = [fmean(step) for step in zip(*(each.success for each in many), strict=True)]
    return [fmean(mean[max(0, end - WINDOW) : end]) for end in range(1, len(mean) + 1)]


def draw(file: Path, runs: Runs) -> None:
    """Held-out success over the bound, and success of training tasks over optimizer steps."""
    from matplotlib.figure import Figure  # the object interface needs no display

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_heldout(left, runs)
    _draw_curves(right, runs)
    for axes in (left, right):
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.25)
    figure.suptitle("The quickstart on samples that are older and older")
    figure.savefig(file, dpi=120)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 4, 8], help="in versions")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of a run")
    # Twice the quickstart's: what was sampled long ago is soon far away.
    parser.add_argument("--learning-rate", type=float, default=8e-4, help="at its highest")
    modes = ("disaggregated", "multiplexed")
    parser.add_argument("--mode", choices=modes, default=modes[0], help="of the quickstart")
    return parser.parse_args()


def _measure(given: argparse.Namespace) -> dict[Condition, list[Outcome]]:
    """Seed by seed; all runs of a seed start with the same model and tasks."""
    every, console = conditions(given.bounds), Console(stderr=True)
    runs: dict[Condition, list[Outcome]] = {condition: [] for condition in every}
    for place, seed in enumerate(given.seeds):
        start: dict[str, str] = {}  # the first run of a seed prepares it
        for condition in in_turn(every, place, len(given.seeds)):
            rules = settings(condition, steps=given.steps, learning_rate=given.learning_rate)
            environment = rules | start
            kind = f"lag-{condition.name}"
            summary = seeds.run(given.mode, seed, kind=kind, environment=environment)
            run = Path("runs", summary["run"])
            start = start or seeds.start_of(run)
            found = outcome(summary, read_steps(run / "metrics.jsonl"))
            runs[condition].append(found)
            done = f"held-out {found.heldout:.1%}, lag {found.lag:.1f}"
            console.print(f"seed {seed}, {condition.name}: {done}", highlight=False)
    return runs


def _claim(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """A lag of one step, corrected, against none: differences are of runs with the same seed."""
    lagging = samples.get("lag1_corrected.heldout_after")
    on_policy = samples.get("on_policy.heldout_after")
    if lagging is None or on_policy is None:
        return {}
    differences = [ours - theirs for ours, theirs in zip(lagging, on_policy, strict=True)]
    found = {"lag1_minus_on_policy": fmean(differences)}
    if len(differences) > 1:
        error = stdev(differences) / sqrt(len(differences))
        found["lag1_minus_on_policy_standard_error"] = error
        found["on_policy_deviation"] = stdev(on_policy)
    return found


def _print(runs: Runs) -> None:
    table = Table(*_COLUMNS, title="The quickstart on samples that are older and older")
    for condition, many in runs.items():
        heldout = [each.heldout for each in many]
        table.add_row(
            condition.name,
            f"{fmean(each.lag for each in many):.2f}",
            f"{fmean(heldout):.1%}",
            f"{stdev(heldout):.1%}" if len(heldout) > 1 else "–",
            f"{min(heldout):.1%}",
            f"{max(heldout):.1%}",
            f"{fmean(fmean(each.success) for each in many):.1%}",
        )
    Console().print(table)


def _draw_heldout(axes: Any, runs: Runs) -> None:
    """A line through the means, bars from lowest to highest, a dot for each run."""
    for (corrected, label, colour), offset in zip(_LINES, (-0.06, 0.06), strict=True):
        line = {
            condition.bound + offset: [each.heldout for each in many]
            for condition, many in runs.items()
            # On-policy runs begin both lines.
            if condition.bound == 0 or condition.corrected is corrected
        }
        means = [fmean(values) for values in line.values()]
        below = [mean - min(values) for mean, values in zip(means, line.values(), strict=True)]
        above = [max(values) - mean for mean, values in zip(means, line.values(), strict=True)]
        axes.errorbar(list(line), means, yerr=[below, above], capsize=3, color=colour, label=label)
        dots = [(place, value) for place, values in line.items() for value in values]
        axes.scatter(*zip(*dots, strict=True), s=14, color=colour, alpha=0.6)
    axes.set_xticks(sorted({condition.bound for condition in runs}))
    axes.set(xlabel="most versions that a sample is behind", ylabel="held-out success at the end")
    axes.legend(loc="lower left", frameon=False)


def _draw_curves(axes: Any, runs: Runs) -> None:
    """A line for each condition; a bound has one colour."""
    bounds = sorted({condition.bound for condition in runs})
    for condition, many in runs.items():
        values = curve(many)
        axes.plot(
            range(1, len(values) + 1),
            values,
            color=f"C{bounds.index(condition.bound)}",
            linestyle="-" if condition.corrected else "--",
            label=condition.name.replace("_", " "),
        )
    axes.set(xlabel="optimizer step", ylabel=f"success of training tasks, mean of {WINDOW} steps")
    axes.legend(loc="lower right", frameon=False, fontsize=8, ncols=2)


if __name__ == "__main__":
    main()
