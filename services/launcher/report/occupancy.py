"""Node utilization during training, sampled periodically, and the plots of a finished run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from seamflow.durations import seconds_of
from seamflow.inspect.snapshot import Snapshot
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

from services.lib.evaluation import EvaluationLine, shown_mean

_COLOURS = {
    "rollout": "#4c9be8",
    "train": "#3fae6a",
    "score": "#e8894c",
    "reward": "#a8623a",
    "starting": "#f7e3a8",
    "switching": "#f2c14e",
    "idle": "#d9d9d9",
    "unknown": "#888888",
    "lost": "#d64545",
}


@dataclass(slots=True)
class Stretch:
    """A time in which a node was seen to do one thing."""

    node: str
    activity: str
    begin: float
    """Seconds since the first snapshot."""
    end: float


@dataclass(slots=True)
class Occupancy:
    """Seconds of each node by activity; add snapshots at short intervals.

    Table and timeline of a run are both made from it, and so agree.
    """

    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Node -> "rollout", "train", ..., "starting", "switching", "idle", "unknown" or "lost" ->
    seconds. starting: its first switch, as processes load the model."""
    stretches: list[Stretch] = field(default_factory=list)
    began: float | None = None
    """Unix time of the first snapshot."""
    switch_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Node -> new activity tag -> seconds of a switch to it, the scheduler's decayed mean."""
    _last: float | None = None
    _first: float | None = None

    def add(self, snapshot: Snapshot, now: float | None = None) -> None:
        """Count the time since the previous snapshot towards each node's current activity.

        `now`: monotonic seconds; default: this machine's clock.
        """
        if not snapshot.nodes:
            return  # the scheduler did not answer; the next snapshot covers this time
        now = time.monotonic() if now is None else now
        since, self._last = now if self._last is None else self._last, now
        if self._first is None:
            self._first, self.began = now, time.time()
        for node in snapshot.nodes:
            spent = self.seconds.setdefault(node.node_id, {})
            activity = observed_activity(node, snapshot)
            if activity == "switching" and not spent.keys() - {"starting"}:
                activity = "starting"
            spent[activity] = spent.get(activity, 0.0) + now - since
            self._draw(Stretch(node.node_id, activity, since - self._first, now - self._first))
            self.switch_seconds[node.node_id] = {
                tag: seconds_of(each) for tag, each in node.switch_durations.items()
            }

    def _draw(self, stretch: Stretch) -> None:
        """Lengthen the node's newest stretch, or begin another one."""
        mine = (each for each in reversed(self.stretches) if each.node == stretch.node)
        newest = next(mine, None)
        if newest is None or newest.activity != stretch.activity:
            self.stretches.append(stretch)
        else:
            newest.end = stretch.end

    def shares(self) -> dict[str, dict[str, Any]]:
        """Node -> shares of its time, which add up to 1, and its "switch_seconds"."""
        return {
            name: {
                "idle": 0.0,
                **{activity: round(each / total, 4) for activity, each in seconds.items()},
                "switch_seconds": self.switch_seconds[name],
            }
            for name, seconds in sorted(self.seconds.items())
            if (total := sum(seconds.values()))
        }


class CoresBusy:
    """Mean number of this machine's cores that are busy, by any process."""

    def __init__(self) -> None:
        self._began, self._spent = time.monotonic(), _cpu_seconds()

    def mean(self) -> float:
        return (_cpu_seconds() - self._spent) / (time.monotonic() - self._began)


def _cpu_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


def observed_activity(node: scheduler_pb.Node, snapshot: Snapshot) -> str:
    """Activity of a node: a server without turns and a trainer that waits are "idle".

    "unknown" if the worker does not answer.
    """
    if node.state == scheduler_pb.NODE_STATE_LOST:
        return "lost"
    if node.reported_epoch != node.assignment.epoch:
        return "switching"
    if node.state != scheduler_pb.NODE_STATE_ACTIVE:
        return "idle" if node.state == scheduler_pb.NODE_STATE_IDLE else "switching"
    return _at_work(node, snapshot)


def _at_work(node: scheduler_pb.Node, snapshot: Snapshot) -> str:
    tag, info, trainer = (
        node.assignment.tag,
        snapshot.answering_servers.get(node.node_id),
        snapshot.trainer,
    )
    if tag == "rollout":
        busy = info and info.num_running + info.num_queued > 0
    elif tag == "train":
        busy = trainer and trainer.state == trainer_pb.TRAINER_STATE_TRAINING
    else:
        busy = True
    if busy is None:
        return "unknown"
    return tag if busy else "idle"


def draw_run(
    folder: Path,
    steps: Sequence[dict[str, Any]],
    evaluations: Sequence[EvaluationLine],
    occupancy: Occupancy,
) -> None:
    """Write reward_curve.png and timeline.png."""
    draw_reward_curve(folder / "reward_curve.png", steps, evaluations)
    draw_timeline(folder / "timeline.png", occupancy, steps)


def draw_reward_curve(
    file: Path, steps: Sequence[dict[str, Any]], evaluations: Sequence[EvaluationLine]
) -> None:
    """Reward and success by optimizer step, with the evaluations and their intervals."""
    figure, axes = _figure(8, 4)
    numbers = [step["step"] for step in steps]
    axes.plot(
        numbers, [step["reward_mean"] for step in steps], label="mean reward", color="#3fae6a"
    )
    # Release 0.2 wrote it without the prefix.
    success = [step.get("reward/success", step.get("success", math.nan)) for step in steps]
    if not all(map(math.isnan, success)):
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
    # Files of before may hold bounds that rounding has put on the other side of their mean.
    below = [max(mean - low, 0.0) for mean, (low, _) in zip(means, intervals, strict=True)]
    above = [max(high - mean, 0.0) for mean, (_, high) in zip(means, intervals, strict=True)]
    axes.errorbar(
        [line.step for line in shown],
        means,
        yerr=(below, above),
        fmt="o",  # no line: nothing is known between two evaluations
        capsize=3,
        label=f"{shown[-1].metric}, held-out tasks (95 %)",
        color="#d64545",
    )
    best = next((line for line in reversed(shown) if line.is_best), None)
    for line, mean, (_, high) in zip(shown, means, intervals, strict=True):
        if line in (shown[0], shown[-1], best):
            axes.annotate(
                shown_mean(mean, line.metric),
                (line.step, high),
                textcoords="offset points",
                xytext=(0, 6),
                ha="center",
            )


def draw_timeline(file: Path, occupancy: Occupancy, steps: Sequence[dict[str, Any]]) -> None:
    """One row per node, coloured by what it was seen to do; thin lines mark optimizer steps."""
    if not occupancy.stretches or occupancy.began is None:
        return
    end = max(stretch.end for stretch in occupancy.stretches)
    shares = occupancy.shares()
    names = sorted(shares)
    figure, axes = _figure(11, 1.4 + 0.6 * len(names))
    seen: set[str] = set()
    for each in occupancy.stretches:
        if each.node in shares:
            label = None if each.activity in seen else each.activity
            seen.add(each.activity)
            colour = _COLOURS.get(each.activity, "#555555")
            row = names.index(each.node)
            axes.barh(row, each.end - each.begin, left=each.begin, color=colour, label=label)
    for step in steps:
        if 0 <= (place := step["time"] - occupancy.began) <= end:
            axes.axvline(place, color="black", alpha=0.25, linewidth=0.6)
    axes.set_yticks(range(len(names)), [_row_name(name, shares[name]) for name in names])
    axes.set(xlabel="seconds of training since the last start (thin lines: optimizer steps)")
    axes.set_title("Nodes during training, by a look a second (waiting counts as idle)")
    axes.set_xlim(0, max(end, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=6, frameon=False)
    _save(figure, file)


def _row_name(name: str, shares: Mapping[str, Any]) -> str:
    """The node with the shares of the table, the greatest first."""
    spent = {activity: each for activity, each in shares.items() if activity != "switch_seconds"}
    most = sorted(spent, key=lambda activity: -spent[activity])[:2]
    return "\n".join([name, ", ".join(f"{each} {spent[each]:.0%}" for each in most if spent[each])])


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # the object interface needs no display

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file, dpi=120)
