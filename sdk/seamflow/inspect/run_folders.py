"""`seamflow runs`: the run folders of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from seamflow.inspect.learning import not_learning
from seamflow.inspect.progress import read_progress
from seamflow.inspect.run_files import json_object
from seamflow.network.host_port import listens

_COLUMNS = ("run", "state", "steps", "reward", "best", "health", "started (UTC)", "folder")


def print_run_folders(parent: Path) -> int:
    """Print a line for each run below `parent`, the newest first."""
    rows = [tuple(row.values()) for row in run_folders(parent)]
    if not rows:
        print(f"no runs in {parent}: start one with `seamflow train`, or give --folder")
        return 0
    widths = [max(len(row[i]) for row in (_COLUMNS, *rows)) for i in range(len(_COLUMNS))]
    for row in (_COLUMNS, *rows):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0


def run_folders(parent: Path) -> list[Mapping[str, str]]:
    """State, steps, last mean reward, best evaluation and health of each run, the newest first."""
    folders = [
        file.parent for file in parent.glob("*/addresses.json") if not file.parent.is_symlink()
    ]
    return [_row(folder) for folder in sorted(folders, key=started, reverse=True)]


def _row(folder: Path) -> Mapping[str, str]:
    progress = read_progress(folder)
    last = progress.steps[-1] if progress.steps else {}
    reward = last.get("reward_mean")
    best = json_object(folder / "checkpoints" / "best" / "best.json")
    return {
        "run": folder.name,
        "state": run_state(folder),
        "steps": str(last.get("step", 0)),
        "reward": "" if reward is None else f"{reward:.3f}",
        "best": f"{best['value']:.3f} at step {best['step']}" if best else "",
        "health": ", ".join(each.rule for each in not_learning(progress)) or "ok",
        "started": datetime.fromtimestamp(started(folder), UTC).strftime("%Y-%m-%d %H:%M"),
        "folder": str(folder),
    }


def run_state(folder: Path) -> str:
    """running: its gateway's port answers; else its end: finished, stopped, failed, or killed."""
    address = str(json_object(folder / "addresses.json").get("rollout_gateway", ""))
    if listens(address):
        return "running"
    end = json_object(folder / "end.json")
    is_finished = (folder / "summary.json").is_file()
    return str(end.get("state", "finished" if is_finished else "killed"))


def started(folder: Path) -> float:
    """Unix time at which the launcher last started the run."""
    return (folder / "addresses.json").stat().st_mtime
