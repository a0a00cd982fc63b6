"""Curves: metrics of all steps, and evaluations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from seamflow.inspect.snapshot import Snapshot

from services.console.sources.shown_run import ShownRun
from services.console.views.evaluations import evaluation_points

_DEFAULT = ("reward_mean",)


def step_curves(
    run: ShownRun, snapshot: Snapshot, names: Sequence[str], since: int
) -> dict[str, Any]:
    """Values of the metrics `names` in all steps after `since`, and the names of all metrics."""
    table = run.steps
    first = bisect_right(table.steps, since)
    wanted = names or [name for name in _DEFAULT if name in table.names]
    return {
        "steps": table.steps[first:],
        "time": list(table.column("time")[first:]),
        "metrics": {name: list(table.column(name)[first:]) for name in wanted},
        "names": [name for name in table.names if name != "time"],
        "evaluations": [e for e in evaluation_points(run, snapshot) if (e["step"] or 0) > since]
        if since
        else evaluation_points(run, snapshot),
    }
