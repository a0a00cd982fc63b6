"""The Redis store against its in-memory model, over random histories.

Each history is one run under rules of its own: agents, gateways, trainers and consumers act at
random, answers are lost and calls repeated, managers die between two steps, and in every fifth
round Redis itself is killed and restarted. After each operation both must show the same.

    python -m tests.suites.state_machine --operations 10000 --seed 0
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections import Counter
from itertools import count
from pathlib import Path

from bench.report import Report
from tests.suites.state_machine.machine import MACHINES, explore, rig

HISTORIES = 10
RULES = 80
FIGURES = (
    "operations",
    "retries_injected",
    "crashes_injected",
    "store_restarts",
)


def main() -> None:
    """Explore until there were enough operations; exit with 1 if the stores disagreed."""
    arguments = _parse()
    counts, seeds = Counter[str](), list[int]()
    for seed in count(arguments.seed):
        seeds.append(seed)
        counts.update(_round(seed, restarts=len(seeds) % 5 == 0))
        print(f"seed {seed}: {counts['operations']} operations", file=sys.stderr, flush=True)
        if counts["operations"] >= arguments.operations and counts["store_restarts"]:
            break
    figures = {name: float(counts[name]) for name in (*FIGURES, "disagreements")}
    Report(bench="store_model", figures=figures, seeds=seeds).publish()
    sys.exit(counts["disagreements"] > 0)


def _round(seed: int, *, restarts: bool) -> Counter[str]:
    """The counts; a disagreement is printed with the shortest history found for it."""
    with tempfile.TemporaryDirectory() as folder, rig(Path(folder), restarts=restarts) as on:
        histories, rules = (3, 30) if restarts else (HISTORIES, RULES)
        try:
            kind = MACHINES[seed % len(MACHINES)]
            explore(on, kind, histories=histories, rules=rules, first_seed=seed)
        except Exception:
            traceback.print_exc()
            on.counts["disagreements"] += 1
        return on.counts


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000, help="at least this many")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    return parser.parse_args()


if __name__ == "__main__":
    main()
