"""Curves: metrics of all steps, and evaluations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from seamflow.inspect.run_files import json_lines
from seamflow.inspect.snapshot import Snapshot

from services.console.sources.shown_runs import ShownRun

_DEFAULT = ("reward_mean",)


def evaluation_points(run: ShownRun, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Step, mean, bounds of its confidence interval and whether it was the best so far."""
    if run.folder is not None and (run.folder / "evaluation.jsonl").is_file():
        return [_of_file(line) for line in json_lines(run.folder / "evaluation.jsonl")]
    said = snapshot.evaluations
    return [] if said is None else [_of_service(line) for line in said.evaluations]


def _of_file(line: dict[str, Any]) -> dict[str, Any]:
    low, high = line.get("interval") or (None, None)
    return _point(
        line.get("step"), line.get("mean"), low, high, line.get("is_best"), line.get("metric")
    )


def _of_service(line: Any) -> dict[str, Any]:
    low, high = (line.low, line.high) if line.HasField("low") else (None, None)
    mean = line.mean if line.HasField("mean") else None
    return _point(line.step, mean, low, high, line.is_best, line.metric)


def _point(step: Any, mean: Any, low: Any, high: Any, is_best: Any, metric: Any) -> dict[str, Any]:
    values = {"step": step, "mean": mean, "low": low, "high": high}
    return {**values, "best": bool(is_best), "metric": metric}


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
