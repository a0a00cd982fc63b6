"""Seconds of a stage by the number of nodes that do it, from a profiler."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

__all__ = ["Seconds", "StageProfile"]

Seconds = Callable[[int], float]
"""Seconds of a stage by number of nodes; infinite where that many cannot do it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProfile:
    """A measured table: exact at its points, linear in 1 / nodes between them.

    A stage is a part that nodes share and a part that they do not, a + b / nodes; between two
    points that is the law of those two. Fewer nodes than measured cannot do it (their memory may
    not suffice), more bring nothing: nobody has seen either.

    Example: StageProfile.of({8: 120.0, 16: 70.0}).seconds(12) == 86.66…

    Raises:
        ValueError: no point, or one that is not positive, not finite, or slower than fewer nodes.
    """

    nodes: tuple[int, ...]
    """Numbers of nodes measured, ascending."""
    stage_seconds: tuple[float, ...]
    """Seconds of one iteration's stage on each of them."""

    def __post_init__(self) -> None:
        if not self.nodes or len(self.nodes) != len(self.stage_seconds):
            raise ValueError(
                f"it has {len(self.nodes)} node counts and {len(self.stage_seconds)} times: "
                "give at least one point, a time for each count"
            )
        before = (0, math.inf)
        for point in zip(self.nodes, self.stage_seconds, strict=True):
            _check(point, before)
            before = point

    @classmethod
    def of(cls, table: Mapping[int, float]) -> Self:
        """From nodes -> seconds, in any order."""
        points = sorted(table.items())
        return cls(
            nodes=tuple(count for count, _ in points),
            stage_seconds=tuple(seconds for _, seconds in points),
        )

    def seconds(self, num_nodes: int) -> float:
        """Seconds of the stage on `num_nodes` nodes; infinite below the fewest measured."""
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


def _check(point: tuple[int, float], before: tuple[int, float]) -> None:
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
