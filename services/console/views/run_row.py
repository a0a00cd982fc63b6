"""A row of the list of runs."""

from __future__ import annotations

from typing import Any

from seamflow.inspect.run_folders import started
from seamflow.inspect.snapshot import Snapshot

from services.console.sources.shown_run import ShownRun
from services.console.views.evaluations import evaluation_points
from services.console.views.overview import run_state


def run_row(run: ShownRun, snapshot: Snapshot) -> dict[str, Any]:
    """A run in the list; times in Unix seconds, None where nothing is known."""
    newest = run.steps.newest()
    results = [each for each in evaluation_points(run, snapshot) if each["best"]]
    addresses = None if run.folder is None else run.folder / "addresses.json"
    return {
        "id": run.run_id,
        "name": run.run_id,
        "state": run_state(run, snapshot),
        "live": run.is_live,
        "step": int(newest.get("step") or (run.steps.steps[-1] if run.steps.steps else 0)),
        "reward": newest.get("reward_mean"),
        "best_heldout": results[-1]["mean"] if results else None,
        "started": started(addresses.parent) if addresses and addresses.is_file() else None,
        "ended": None if run.is_live else run.end or None,
        "model": run.model,
        "algorithm": run.algorithm(),
    }
