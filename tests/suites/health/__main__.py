"""`make test-health`: ways not to learn are named in time; healthy runs have no alarm, nor have
those that are stopped, killed and resumed, whose figures are true.

`--only NAME` makes only these runs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.report import RESULTS, Report
from tests.suites.health.lived import Lived, live
from tests.suites.health.way import Found, Way, is_healthy, is_named, run
from tests.suites.health.ways import HEALTHY, RESUMED, WAYS

BENCH = "test-health"


def figures_of(
    ways: Mapping[Way, Found], healthy: Mapping[Way, Found], lived: Mapping[Way, Lived]
) -> dict[str, float]:
    """Counts, and for each way the steps after which it was named."""
    named = {way: found.named[way.rule] for way, found in ways.items() if way.rule in found.named}
    steps = {way.name: step for way, (step, _) in named.items()}
    return {
        "ways": len(ways),
        "healthy": len(healthy),
        "unnamed": sum(not is_named(way, found) for way, found in ways.items()),
        "false_alarms": sum(not is_healthy(found) for found in healthy.values())
        + sum(len(each.false_alarms) for each in lived.values()),
        "resumed": len(lived),
        "differ": sum(len(each.differ) for each in lived.values()),
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
        lived = _lived(only, Path(folder))
    figures = figures_of(ways, healthy, lived)
    report = Report(bench=BENCH, figures=figures)
    report.show() if only else report.publish(RESULTS)
    bad = ("unnamed", "false_alarms", "differ")
    raise SystemExit(1 if any(figures[name] for name in bad) else 0)


def _found(these: tuple[Way, ...], only: list[str], folder: Path) -> dict[Way, Found]:
    found = {}
    for way in these:
        if not only or way.name in only:
            found[way] = run(way, folder / way.name)
            print(f"{way.name}: step {found[way].step}, {found[way].named}", flush=True)
    return found


def _lived(only: list[str], folder: Path) -> dict[Way, Lived]:
    lived = {}
    for way in RESUMED:
        if not only or way.name in only:
            lived[way] = live(way, folder / way.name, (5, 12))
            print(f"{way.name}: {lived[way].false_alarms}, {lived[way].differ}", flush=True)
    return lived


if __name__ == "__main__":
    main()
