"""Node utilization during training, sampled periodically."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import psutil
from seamflow.durations import seconds_of
from seamflow.inspect.snapshot import Snapshot
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb


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
    """The same in the order of time, for the timeline."""
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
        """The mean since this object was created."""
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
