"""`make bench-allocation`: nodes that move next to every fixed split, and a trainer that resizes.

Lengths double in the middle of a run in virtual time, for each seed with every split that is fixed
and with nodes that the scheduler moves. Then real gloo ranks: a trainer that grows and shrinks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.report import Report
from bench.sim.allocation.drifting_run import NODES, Rates, drifting_setting, fixed, moving, rates
from bench.sim.allocation.elastic_ranks import elastic_ranks
from bench.sim.simulator.simulation import Result
from bench.size.small_models import make_model

_MOVING = 0
"""Number of training nodes that stands for those that move."""


def main() -> None:
    """Measure both, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds: list[int] = parser.parse_args().seeds
    with TemporaryDirectory(prefix="seamflow-allocation-") as folder:
        ranks = elastic_ranks(make_model(Path(folder) / "model", "tied"), Path(folder))
    raw: dict[str, Sequence[float]] = {}
    figures: list[Mapping[str, float]] = []
    for seed in seeds:
        found, moves = _runs(seed)
        figures.append(compared(found, moves))
        raw |= {f"{seed}.{name}": values for name, values in _raw(found)}
    worst = {
        name: (max if name == "moves" else min)(each[name] for each in figures)
        for name in figures[0]
    }
    Report(
        bench="allocation",
        figures={**worst, **ranks},
        raw=raw,
        seeds=seeds,
        packages=("torch",),
    ).publish()


def compared(found: Mapping[int, Rates], moves: int) -> dict[str, float]:
    """Throughput with moving nodes over the best fixed split's, which is another in each phase.

    Args:
        found: by nodes of the fixed split that train; `_MOVING`: they move.
        moves: of nodes.
    """
    fixed_rates = [each for number, each in found.items() if number != _MOVING]
    figures = {"moves": float(moves)}
    for phase in ("before", "after", "whole"):
        best = max(getattr(each, phase) for each in fixed_rates)
        worst = min(getattr(each, phase) for each in fixed_rates)
        figures[f"{phase}_vs_best_fixed"] = getattr(found[_MOVING], phase) / best
        figures[f"{phase}_vs_worst_fixed"] = getattr(found[_MOVING], phase) / worst
    return figures


def _runs(seed: int) -> tuple[dict[int, Rates], int]:
    setting = drifting_setting(seed)
    size = setting.workload.rollouts_per_step
    found: dict[int, Rates] = {}
    for number in range(1, NODES):
        found[number] = rates(fixed(setting, number).step_ends, size)
        _tell(seed, f"{number} train", found[number])
    result: Result = moving(setting)
    found[_MOVING] = rates(result.step_ends, size)
    _tell(seed, "moving", found[_MOVING], *result.moves)
    return found, len(result.moves)


def _tell(seed: int, name: str, found: Rates, *moves: str) -> None:
    line = ", ".join(f"{phase} {rate:.2f}/s" for phase, rate in asdict(found).items())
    print(f"seed {seed}, {name}: {line}", *moves, sep="\n  ", file=sys.stderr)


def _raw(found: Mapping[int, Rates]) -> Iterator[tuple[str, list[float]]]:
    for number, each in found.items():
        name = "moving" if number == _MOVING else f"train_{number}"
        yield name, [each.before, each.after, each.whole]


if __name__ == "__main__":
    main()
