"""Profile of a stage: measured seconds by number of nodes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from services.lib.decode_latency import Point, check_points, columns

Seconds = Callable[[int], float]
"""Seconds of a stage by number of nodes; infinite if they are too few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProfile:
    """A measured table: exact at its points, linear in 1 / nodes between them.

    Between two points a stage is modelled as a constant plus a part that scales, a + b / nodes.
    Fewer nodes than measured cannot do the stage (their memory may not suffice), and more nodes
    than measured are not faster.

    Example: StageProfile.of({8: 120.0, 16: 70.0}).seconds(12) == 86.66…

    Raises:
        ValueError: no point, or one that is not positive, not finite, or slower than fewer nodes.
    """

    nodes: tuple[int, ...]
    """Measured numbers of nodes, ascending."""
    stage_seconds: tuple[float, ...]
    """Seconds of one iteration's stage on each of them."""

    def __post_init__(self) -> None:
        check_points(
            self.nodes,
            self.stage_seconds,
            _check,
            before=(0, math.inf),
            subject="it",
            unit="node count",
        )

    @classmethod
    def of(cls, table: Mapping[int, float]) -> Self:
        """From nodes -> seconds, in any order."""
        nodes, stage_seconds = columns(table)
        return cls(nodes=nodes, stage_seconds=stage_seconds)

    def seconds(self, num_nodes: int) -> float:
        """Seconds of the stage on `num_nodes` nodes; infinite below the smallest measured."""
        nodes, times = self.nodes, self.stage_seconds
        if num_nodes < nodes[0]:
            return math.inf
        if num_nodes >= nodes[-1]:
            return times[-1]
        right = bisect_left(nodes, num_nodes)
        if nodes[right] == num_nodes:
            return times[right]
        left = right - 1
        # 1/n between 1/left and 1/right, as the weight of the left point.
        weight = nodes[left] * (nodes[right] - num_nodes) / num_nodes / (nodes[right] - nodes[left])
        return times[right] + weight * (times[left] - times[right])


def _check(point: Point, before: Point) -> None:
    (nodes, seconds), (nodes_before, seconds_before) = point, before
    if nodes <= nodes_before:
        raise ValueError(
            f"it has {nodes} nodes after {nodes_before}: "
            "give positive counts in ascending order, each once"
        )
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{nodes} nodes take {seconds} s: give a positive, finite time")
    if seconds > seconds_before:
        raise ValueError(
            f"{nodes} nodes take {seconds} s and {nodes_before} take {seconds_before} s: "
            "more nodes must not be slower, measure both again or leave the larger count out"
        )
