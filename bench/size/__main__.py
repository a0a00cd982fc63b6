"""`make bench-size`: steps of models and batches of real size, computed without a GPU."""

from __future__ import annotations

import argparse

from bench.report import Report
from bench.size import forecast
from bench.size.balance import balance
from bench.size.fitting import fitting
from bench.size.four_ranks import four_ranks
from bench.size.loading import loading
from bench.size.training_speed import training_speed

_SEEDS = 5


def main() -> None:
    """Compute all parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first of five")
    first = parser.parse_args().seed
    seeds = range(first, first + _SEEDS)
    balanced = balance(seeds)
    figures = {
        **balanced.figures,
        **loading(),
        **four_ranks(),
        **fitting(),
        **forecast.figures(),
        **training_speed(),
    }
    Report(
        bench="size",
        figures=figures,
        raw=balanced.raw,
        seeds=list(seeds),
        packages=("seamflow", "torch", "transformers"),
    ).publish()


if __name__ == "__main__":
    main()
