"""`make chaos-trainer`: SIGKILLs of real trainers must not change training.

Trainers of a tiny model, on one rank and on two under torchrun, are killed at random times and
restarted. Their samples, weights and optimizer state are compared with those of an undisturbed run,
bit by bit; with concurrent producers, every sample is accounted for. PPO with a critic of its own
and several updates in a step is killed under FSDP and in a pipeline, and moves between the two.

`--quick` divides every count by ten; `--only one-rank live` runs some scenarios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

from bench.report import Report
from tests.chaos.suite import Suite, broken_limits, exit_if_broken
from tests.chaos.trainer.checker import Verdict
from tests.chaos.trainer.controls import controls
from tests.chaos.trainer.rig import rig
from tests.chaos.trainer.scenarios import (
    PPO,
    PPO_PIPELINE,
    SPARSE,
    STREAMED,
    Outcome,
    References,
    live,
    moved,
    recorded,
    resized,
)

BENCH = "chaos_trainer"
_MOST = {"resized_weights_max_difference": 1e-5, "moved_weights_max_difference": 1e-5}
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
        "sparse": partial(recorded, kills=count(6), world_size=1, flags=SPARSE),
        "live": partial(live, kills=count(10)),
        "resized": resized,
        "ppo": partial(recorded, kills=count(10), world_size=2, flags=PPO),
        "ppo-pipeline": partial(recorded, kills=count(10), world_size=2, flags=PPO_PIPELINE),
        "moved": moved,
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
    """The limits that the figures break, by name."""
    return broken_limits(figures, _MOST, _NONE)


def main() -> None:
    """Run the scenarios, print and write the figures; exit 1 if a limit is broken."""
    suite = Suite[Scenario].from_arguments(__doc__, scenarios)
    with suite.setting() as setting:
        with rig(setting) as services:
            outcome = run(suite.names, suite.chosen, References(services))
        folder = suite.report_folder(setting)
        figures = figures_of(outcome)
        Report(bench=BENCH, figures=figures, raw=outcome.raw, seeds=[suite.seed]).publish(folder)
    exit_if_broken(broken(figures))


if __name__ == "__main__":
    main()
