"""`make test-field`: inputs of every kind that people send, with their right values.

`--only math_answers` tries the areas given, `--inputs N` tries N generated inputs of each kind.
"""

from __future__ import annotations

import argparse
import time

from rich.console import Console

from bench.report import RESULTS, Report
from tests.suites.field.areas import AREAS, kinds_of
from tests.suites.field.kind import Kind, Tried

BENCH = "test-field"


def figures_of(tried: dict[str, Tried], seconds: float) -> dict[str, float]:
    """Figures: inputs and failures of all kinds together, then of each."""
    figures: dict[str, float] = {
        "kinds": len(tried),
        "inputs": sum(of_kind.inputs for of_kind in tried.values()),
        "failed": sum(len(of_kind.failures) for of_kind in tried.values()),
        "seconds": round(seconds, 1),
    }
    for name, of_kind in tried.items():
        figures[f"{name}.inputs"] = of_kind.inputs
        figures[f"{name}.failed"] = len(of_kind.failures)
    return figures


def main() -> None:
    """Try all, print and write the figures; exit 1 if one failed."""
    given = _arguments()
    console, began = Console(stderr=True), time.monotonic()
    tried: dict[str, Tried] = {}
    for kind in (kind for area in given.only for kind in kinds_of(area)):
        tried[kind.name] = _tried(kind, given, console)
    figures = figures_of(tried, time.monotonic() - began)
    report = Report(bench=BENCH, figures=figures, seeds=[given.seed])
    complete = given.inputs is None and list(given.only) == list(AREAS)
    report.publish(RESULTS) if complete else report.show()
    raise SystemExit(1 if figures["failed"] else 0)


def _tried(kind: Kind, given: argparse.Namespace, console: Console) -> Tried:
    limit = kind.long if given.inputs is None else given.inputs
    tried = kind.try_inputs(limit, given.seed)
    console.print(f"{kind.name}: {tried.inputs} inputs, {len(tried.failures)} failed")
    for failure in tried.failures[:5]:
        console.print(f"  {failure}", markup=False)
    return tried


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--inputs", type=int, help="generated inputs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
