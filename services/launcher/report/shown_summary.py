"""The summary of a run in the terminal: what was learned, what went wrong, counters, nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from seamflow.inspect.progress import WINDOW

_LEARNED = (
    "run",
    "seed",
    "reward_first",
    "reward_last",
    "heldout_before",
    "heldout_best",
    "heldout_after",
    "heldout_tasks",
    "evaluations",
    "best_step",
    "best_checkpoint",
    "best_note",
    "trained_tokens_per_second",
    "health",
    "failures",
)


def show_summary(summary: Mapping[str, Any], folder: Path, console: Console | None = None) -> None:
    """Print it. Lines with paths are never cut, however narrow the terminal is."""
    console = console or Console()
    console.print(_table(f"run {summary['run']}", dict(_learned(summary))))
    for line in _sentences(summary):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    counters = {name: value for name, value in summary.items() if name not in _LEARNED}
    console.print(_table("services", counters))
    if summary["nodes"]:
        console.print(_nodes(summary["nodes"]))
    console.print(f"summary, pictures and logs: {folder}", soft_wrap=True, highlight=False)


def _learned(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if summary["reward_first"] is not None:
        first, last = summary["reward_first"], summary["reward_last"]
        yield f"reward, first → last {WINDOW} steps", f"{first:.3f} → {last:.3f}"
    if summary["heldout_before"] is not None:
        best = f"best {_share(summary['heldout_best'])} at step {summary['best_step']}"
        yield (
            f"held-out, {summary['heldout_tasks']} tasks",
            f"{_share(summary['heldout_before'])} before → {best} → "
            f"{_share(summary['heldout_after'])} after",
        )
    if summary["trained_tokens_per_second"] is not None:
        yield "trained tokens per second", f"{summary['trained_tokens_per_second']:,.0f}"


def _share(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if 0 <= value <= 1 else f"{value:.3g}"


def _sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    if summary["best_checkpoint"]:
        yield f"best checkpoint: {summary['best_checkpoint']}"
    elif summary["best_note"]:
        yield summary["best_note"]
    yield from (f"health: {line}" for line in summary["health"])
    yield from summary["failures"]


def _table(title: str, rows: Mapping[str, Any]) -> Table:
    table = Table(title=title, show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    for name, value in rows.items():
        if value not in (None, "") and not isinstance(value, dict):
            table.add_row(name, str(value))
    return table


def _nodes(nodes: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row per node: shares of its time during training, and mean seconds of its switches."""
    activities = sorted({name for node in nodes.values() for name in node} - {"switch_seconds"})
    tags = sorted({tag for node in nodes.values() for tag in node["switch_seconds"]})
    table = Table(title="nodes during training: share of time at work (waiting counts as idle)")
    heads = (f"switch to {tag}, s" if tag else "release, s" for tag in tags)
    for column in ("node", *activities, *heads):
        table.add_column(column, justify="left" if column == "node" else "right", overflow="fold")
    for name, node in nodes.items():
        seconds = (node["switch_seconds"].get(tag) for tag in tags)
        table.add_row(
            name,
            *(f"{node.get(activity, 0.0):.1%}" for activity in activities),
            *("–" if each is None else f"{each:.3f}" for each in seconds),
        )
    return table
