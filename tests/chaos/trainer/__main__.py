"""`make chaos-trainer`: SIGKILLs of real trainers, and what training lost by them: nothing.

Trainers of a tiny model, on one rank and on two under torchrun, die at random moments and go on.
What they trained on, their weights and their optimizer state are held against a run that nothing
disturbed, bit by bit; beside producers that go on writing every sample is accounted for.

`--quick` divides every count by ten; `--only one-rank live` runs some scenarios.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from bench.harness import processes
from bench.report import RESULTS, Report
from tests.chaos.store.rig import Setting
from tests.chaos.trainer.checker import Verdict
from tests.chaos.trainer.controls import controls
from tests.chaos.trainer.rig import rig
from tests.chaos.trainer.scenarios import STREAMED, Outcome, References, live, recorded, resized

__all__ = ["broken", "figures_of", "main"]

BENCH = "chaos_trainer"
_QUICK = 10
_MOST = {"resized_weights_max_difference": 1e-5}
_NONE = (*Verdict.VIOLATIONS, "kills_missed")

Scenario = Callable[[References, str], Outcome]


def scenarios(divisor: int) -> dict[str, Scenario]:
    """Every scenario by name, with its counts divided by `divisor`."""

    def count(number: int) -> int:
        return max(2, number // divisor)

    return {
        "one-rank": partial(recorded, kills=count(20), world_size=1),
        "two-ranks": partial(recorded, kills=count(10), world_size=2),
        "streamed": partial(recorded, kills=count(6), world_size=1, flags=STREAMED),
        "live": partial(live, kills=count(10)),
        "resized": resized,
        "controls": run_controls,
    }


def run_controls(references: References, name: str) -> Outcome:
    """Every negative control: what it violates is the proof that the checker sees it."""
    progress, seen = references.rig.setting.progress, []
    for own, control in progress.track(controls().items(), description="negative controls"):
        verdict = control.run(references, f"{name}-{own}")
        seen.append(control.seen(verdict))
        progress.console.print(f"control {own}: {found(verdict)}")
    return Outcome(figures={"negative_controls": len(seen), "negative_controls_failed": sum(seen)})


def run(names: Sequence[str], chosen: Mapping[str, Scenario], references: References) -> Outcome:
    """One scenario after the other; what they found together."""
    total = Outcome()
    console = references.rig.setting.progress.console
    for name in names:
        began = time.monotonic()
        outcome = chosen[name](references, name)
        seconds = time.monotonic() - began
        kills = f"{outcome.kills.total} kills, " if outcome.kills.total else ""
        console.print(f"{name}: {kills}{found(outcome.verdict)}, {seconds:.0f} s")
        total += outcome
    return total


def found(verdict: Verdict) -> str:
    """For people: the violations, and how much was looked at."""
    counts = [f"{name} {count:,}" for name, count in asdict(verdict).items() if count]
    return f"{verdict.violations or 'no'} violations ({', '.join(counts)})"


def figures_of(outcome: Outcome) -> dict[str, float]:
    """Every figure by name; none about weights where none were compared."""
    verdict = outcome.verdict
    equal = {"weights_bit_equal": int(verdict.tensors_unequal == 0)}
    return {
        "trainer_kills": outcome.kills.total,
        **(equal if verdict.tensors_compared else {}),
        **asdict(verdict),
        **asdict(outcome.kills),
        "kills_missed": outcome.kills_missed,
        **outcome.figures,
    }


def broken(figures: Mapping[str, float]) -> list[str]:
    """The promises that the figures break, by the name of the figure."""
    failed = [name for name, most in _MOST.items() if not figures.get(name, 0.0) <= most]
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
        with rig(Setting(folder=folder, seed=given.seed, progress=progress)) as services:
            outcome = run(names, chosen, References(services))
        progress.stop()
        figures = figures_of(outcome)
        report = Report(bench=BENCH, figures=figures, raw=outcome.raw, seeds=[given.seed])
        # Only the whole is worth keeping.
        whole = names == list(chosen) and not given.quick
        report.publish(RESULTS if whole else folder)
    if failed := broken(figures):
        sys.exit(f"broken: {', '.join(failed)}")


if __name__ == "__main__":
    main()
