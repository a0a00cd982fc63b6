"""Results on held-out tasks, as points of a curve."""

from __future__ import annotations

from typing import Any

from seamflow.inspect.run_files import json_lines
from seamflow.inspect.snapshot import Snapshot

from services.console.sources.shown_run import ShownRun


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
