"""Mean durations of the switches of nodes: pure functions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from statistics import fmean

from scheduler.model.records import ROLLOUT, Node

_NEWEST = 0.5
"""Weight of the newest switch in the mean of a node's switches."""


def record_switch(node: Node, seconds: float) -> Node:
    """The node with the seconds of a switch to its assignment added to its means."""
    tag = node.assignment.tag
    mean = node.switch_seconds.get(tag, seconds)
    mean += _NEWEST * (seconds - mean)
    return replace(node, switch_seconds={**node.switch_seconds, tag: mean})


def round_trip_seconds(nodes: Collection[Node], tag: str) -> float:
    """Mean seconds of a switch to rollout plus one to `tag`; one not measured equals the other."""
    means = [
        fmean(known)
        for name in (ROLLOUT, tag)
        if (known := [node.switch_seconds[name] for node in nodes if name in node.switch_seconds])
    ]
    return 2 * fmean(means) if means else 0.0
