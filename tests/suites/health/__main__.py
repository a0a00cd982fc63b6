"""`make test-health`: twelve ways not to learn are named in time; six healthy runs have no alarm.

`--only NAME` makes only these runs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.report import RESULTS, Report
from tests.suites.health.way import Found, Way, is_healthy, is_named, run
from tests.suites.health.ways import HEALTHY, WAYS

BENCH = "test-health"


def figures_of(ways: Mapping[Way, Found], healthy: Mapping[Way, Found]) -> dict[str, float]:
    """Counts, and for each way the steps after which it was named."""
    named = {way: found.named[way.rule] for way, found in ways.items() if way.rule in found.named}
    steps = {way.name: step for way, (step, _) in named.items()}
    return {
        "ways": len(ways),
        "healthy": len(healthy),
        "unnamed": sum(not is_named(way, found) for way, found in ways.items()),
        "false_alarms": sum(not is_healthy(found) for found in healthy.values()),
        "steps_until_named_most": max(steps.values(), default=0),
        **{f"{name}.steps_until_named": step for name, step in steps.items()},
    }


def main() -> None:
    """Make all runs, print and write the figures; exit 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[])
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory(prefix="health-") as folder:
        ways, healthy = (_found(these, only, Path(folder)) for these in (WAYS, HEALTHY))
    figures = figures_of(ways, healthy)
    report = Report(bench=BENCH, figures=figures)
    report.show() if only else report.publish(RESULTS)
    raise SystemExit(1 if figures["unnamed"] or figures["false_alarms"] else 0)


def _found(these: tuple[Way, ...], only: list[str], folder: Path) -> dict[Way, Found]:
    found = {}
    for way in these:
        if not only or way.name in only:
            found[way] = run(way, folder / way.name)
            print(f"{way.name}: step {found[way].step}, {found[way].named}", flush=True)
    return found


if __name__ == "__main__":
    main()
