"""Plots of a finished run: reward curve, and timeline of the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seamflow.durations import seconds_of
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb

from services.launcher.evaluation.evaluation_log import EvaluationLine
from services.launcher.view import activity

__all__ = ["draw_reward_curve", "draw_timeline"]

_COLOURS = {
    "rollout": "#4c9be8",
    "rollout (lent)": "#b07be0",
    "train": "#3fae6a",
    "score": "#e8894c",
    "reward": "#a8623a",
    "switching": "#f2c14e",
    "idle": "#d9d9d9",
    "lost": "#d64545",
}


def draw_reward_curve(
    file: Path, steps: Sequence[dict[str, Any]], evaluations: Sequence[EvaluationLine]
) -> None:
    """Reward and success by optimizer step, with the evaluations and their intervals."""
    figure, axes = _figure(8, 4)
    numbers = [step["step"] for step in steps]
    axes.plot(
        numbers, [step["reward_mean"] for step in steps], label="mean reward", color="#3fae6a"
    )
    if steps and "success" in steps[-1]:
        success = [step["success"] for step in steps]
        axes.plot(numbers, success, label="success, training tasks", color="#4c9be8", alpha=0.7)
    _draw_evaluations(axes, evaluations)
    axes.set(xlabel="optimizer step", title="What the agent learned")
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), max(1.08, axes.get_ylim()[1]))
    axes.grid(alpha=0.25)
    axes.legend(loc="best", frameon=False)
    _save(figure, file)


def _draw_evaluations(axes: Any, evaluations: Sequence[EvaluationLine]) -> None:
    """Means with bars for their 95 % intervals; the first, the last and the best have numbers."""
    shown = [line for line in evaluations if line.mean is not None]
    if not shown:
        return
    means = [line.mean or 0.0 for line in shown]
    intervals = [line.interval or (mean, mean) for line, mean in zip(shown, means, strict=True)]
    below = [mean - low for mean, (low, _) in zip(means, intervals, strict=True)]
    above = [high - mean for mean, (_, high) in zip(means, intervals, strict=True)]
    axes.errorbar(
        [line.step for line in shown],
        means,
        yerr=(below, above),
        fmt="o--",
        capsize=3,
        label=f"{shown[-1].metric}, held-out tasks (95 %)",
        color="#d64545",
    )
    best = next((line for line in reversed(shown) if line.is_best), None)
    for line, mean, (_, high) in zip(shown, means, intervals, strict=True):
        if line in (shown[0], shown[-1], best):
            text = f"{mean:.0%}" if 0 <= mean <= 1 else f"{mean:.3g}"
            axes.annotate(
                text, (line.step, high), textcoords="offset points", xytext=(0, 6), ha="center"
            )


def draw_timeline(
    file: Path, events: Sequence[scheduler_pb.AllocationEvent], steps: Sequence[dict[str, Any]]
) -> None:
    """One row per node, coloured by activity; thin lines mark optimizer steps."""
    if not events:
        return
    start, end = seconds_of(events[0].event_time), seconds_of(events[-1].event_time)
    names = sorted({event.node.node_id for event in events})
    figure, axes = _figure(11, 1.2 + 0.6 * len(names))
    seen: set[str] = set()
    for row, name in enumerate(names):
        for doing, since, until in _stretches(name, events, end):
            label = None if doing in seen else doing
            seen.add(doing)
            colour = _COLOURS.get(doing, "#888888")
            axes.barh(row, until - since, left=since - start, height=0.6, color=colour, label=label)
    for step in steps:
        axes.axvline(step["time"] - start, color="black", alpha=0.25, linewidth=0.6)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="seconds (thin lines: optimizer steps)", title="Node activities")
    axes.set_xlim(0, max(end - start, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=6, frameon=False)
    _save(figure, file)


def _stretches(
    name: str, events: Sequence[scheduler_pb.AllocationEvent], end: float
) -> list[tuple[str, float, float]]:
    """(activity, since, until) of one node, in seconds of the scheduler's clock."""
    mine = [event for event in events if event.node.node_id == name]
    changes: list[tuple[str, float]] = []
    for event in mine:
        doing = activity(event.node)
        # A new assignment takes effect when the node reports its epoch.
        if event.node.reported_epoch != event.node.assignment.epoch:
            doing = "switching" if changes else "idle"
        if not changes or changes[-1][0] != doing:
            changes.append((doing, seconds_of(event.event_time)))
    ends = [since for _, since in changes[1:]] + [end]
    return [(doing, since, until) for (doing, since), until in zip(changes, ends, strict=True)]


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # the object interface needs no display

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file, dpi=120)
