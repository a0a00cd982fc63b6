"""`make test-math`: false ones and false zeros of the reward "math" beside other judges.

Exit 1 if in a collection it has more of either than math-verify alone. `--pairs N`: of each
generated collection, without those of packages and without the times; no result is written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import Sequence

from rich.console import Console

from bench.report import RESULTS, Report
from tests.suites.math_verdicts.judges import JUDGES
from tests.suites.math_verdicts.pairs import Pair, collections
from tests.suites.math_verdicts.waiting import measured

_PAIRS = 700
_SLOW, _QUICK, _LIMIT_SECONDS = 200, 200, 40.0


def false_verdicts(judge: str, pairs: Sequence[Pair]) -> tuple[int, int]:
    """False ones and false zeros of a judge."""
    wrong = [pair for pair in pairs if JUDGES[judge](pair) != pair.is_right]
    return sum(not pair.is_right for pair in wrong), sum(pair.is_right for pair in wrong)


def figures_of(found: dict[str, list[Pair]], console: Console) -> dict[str, float]:
    """Counts by judge, of all pairs and by collection; `worse`: where ours has more than alone."""
    figures: dict[str, float] = {"pairs": sum(map(len, found.values())), "worse": 0}
    for name, pairs in found.items():
        counts = {judge: false_verdicts(judge, pairs) for judge in JUDGES}
        console.print(f"{name}: {len(pairs)} pairs, false ones and zeros {counts}")
        pairs_of_counts = zip(counts["ours"], counts["math_verify"], strict=True)
        figures["worse"] += sum(ours > alone for ours, alone in pairs_of_counts)
        for judge, count in counts.items():
            for kind, number in zip(("false_ones", "false_zeros"), count, strict=True):
                figures[f"{judge}.{kind}"] = figures.get(f"{judge}.{kind}", 0) + number
                figures[f"{name}.{judge}.{kind}"] = number
    return figures


def main() -> None:
    """Try all, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, help="of each generated collection")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("math_verify").disabled = True
    console, is_whole = Console(stderr=True), given.pairs is None
    found = collections(given.pairs or _PAIRS, given.seed, packages=is_whole)
    figures = figures_of(found, console)
    if is_whole:
        figures |= asyncio.run(measured(_SLOW, _QUICK, _LIMIT_SECONDS))
    report = Report(bench="test-math", figures=figures, seeds=[given.seed])
    report.publish(RESULTS) if is_whole else print(json.dumps({"figures": figures}))
    raise SystemExit(1 if figures["worse"] else 0)


if __name__ == "__main__":
    main()
