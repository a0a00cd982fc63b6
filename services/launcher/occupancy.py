"""What each node did while the run learned, sampled while it went on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import psutil
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

from services.launcher.service_clients import Facts

__all__ = ["CoresBusy", "Occupancy", "doing"]


@dataclass(slots=True)
class Occupancy:
    """Seconds of each node by what it did; feed it facts at short intervals."""

    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Node -> "rollout", "train", ..., "switching", "idle", "unknown" or "lost" -> seconds."""
    switch_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Node -> tag that a switch led to -> seconds it took, by the scheduler's decayed mean."""
    _last: float | None = None

    def add(self, facts: Facts, now: float | None = None) -> None:
        """Count the time since the facts before as spent on what each node does now.

        `now`: seconds of a monotonic clock; this machine's if not given.
        """
        if not facts.nodes:
            return  # the scheduler did not answer; what follows says what that time was
        now = time.monotonic() if now is None else now
        since, self._last = now if self._last is None else self._last, now
        for node in facts.nodes:
            spent, activity = self.seconds.setdefault(node.node_id, {}), doing(node, facts)
            spent[activity] = spent.get(activity, 0.0) + now - since
            self.switch_seconds[node.node_id] = dict(node.switch_seconds)

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
    """How many of this machine's cores were busy, whatever with, since this was made."""

    def __init__(self) -> None:
        self._began, self._spent = time.monotonic(), _cpu_seconds()

    def mean(self) -> float:
        """Since then."""
        return (_cpu_seconds() - self._spent) / (time.monotonic() - self._began)


def _cpu_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


def doing(node: scheduler_pb.Node, facts: Facts) -> str:
    """What a node does now: a server without turns is idle, and so is a trainer that waits.

    Of one that does not answer it is unknown.
    """
    if node.state == scheduler_pb.NODE_STATE_LOST:
        return "lost"
    if node.reported_epoch != node.assignment.epoch:
        return "switching"
    if node.state != scheduler_pb.NODE_STATE_ACTIVE:
        return "idle" if node.state == scheduler_pb.NODE_STATE_IDLE else "switching"
    return _at_work(node, facts)


def _at_work(node: scheduler_pb.Node, facts: Facts) -> str:
    tag, info, trainer = node.assignment.tag, facts.servers.get(node.node_id), facts.trainer
    if tag == "rollout":
        busy = info and info.num_running + info.num_queued > 0
    elif tag == "train":
        busy = trainer and trainer.state == trainer_pb.TRAINER_STATE_TRAINING
    else:
        busy = True
    if busy is None:
        return "unknown"
    return tag if busy else "idle"
