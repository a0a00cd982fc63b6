"""Split nodes between generation and training (StreamRL, arXiv 2504.15930, Alg. 1 and its section
on dynamic adjustment).

Both stages run concurrently on separate nodes; the slower one sets the pace.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    generation_nodes: int
    training_nodes: int
    generation_seconds: float
    training_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.generation_seconds, self.training_seconds)


def split_nodes(generation: Seconds, training: Seconds, num_nodes: int) -> Split:
    """Alg. 1 in one datacentre: x + y <= n minimising max(P_gen(x), P_train(y)), fewest nodes.

    Exact for any two functions, also if more nodes are slower: the time of k nodes is the running
    minimum up to k. The smallest x and the smallest y that keep the best pace are then found
    independently, so no other split of that pace needs fewer nodes. Linear in `num_nodes`.

    Raises:
        ValueError: fewer than 2 nodes, or no split that can do both.
    """
    if num_nodes < 2:
        raise ValueError(f"num_nodes is {num_nodes}: give at least 2, one for each stage")
    best_generation = _best_up_to(generation, num_nodes - 1)
    best_training = _best_up_to(training, num_nodes - 1)
    fastest = min(map(max, best_generation, reversed(best_training)))
    if math.isinf(fastest):
        raise ValueError(f"num_nodes is {num_nodes}: too few to do both stages")
    return _split(
        generation, _fewest(best_generation, fastest), training, _fewest(best_training, fastest)
    )


def split_datacentres(
    generation: Seconds, training: Seconds, generation_nodes: int, training_nodes: int
) -> Split:
    """Alg. 1 in two datacentres: the faster side shrinks to k minimising |P_fast(k) - T_slow|.

    Both sides start at full size. As in the paper, k may be slightly slower than T_slow if that is
    closer. Among equally close k, the smallest.

    Raises:
        ValueError: a datacentre without nodes, or with too few for its stage.
    """
    _require_nodes("generation_nodes", generation_nodes)
    _require_nodes("training_nodes", training_nodes)
    whole = _split(generation, generation_nodes, training, training_nodes)
    for name, count, seconds in (
        ("generation_nodes", generation_nodes, whole.generation_seconds),
        ("training_nodes", training_nodes, whole.training_seconds),
    ):
        if math.isinf(seconds):
            raise ValueError(f"{name} is {count}: too few for the stage")
    if whole.generation_seconds < whole.training_seconds:
        kept = _closest(generation, generation_nodes, whole.training_seconds)
        return _split(generation, kept, training, training_nodes)
    kept = _closest(training, training_nodes, whole.generation_seconds)
    return _split(generation, generation_nodes, training, kept)


def adjusted(
    split: Split, *, generation: Seconds, training: Seconds, unit: int, num_nodes: int
) -> Split:
    """Adjust a split to measured times: one more unit for a stage, or unchanged.

    StreamRL's dynamic adjustment: δ = T_gen - T_train, δ' = the reduction of T_gen by one more
    unit; when δ >= δ', generation gets the unit. It comes from free nodes, so training continues,
    and since T_gen - δ' >= T_train generation stays the slower stage: it never overshoots. Lengths
    drift after the profile was taken, so δ' is the profile's *relative* gain times the measured
    T_gen. Our extension: a unit for training by the same rule.

    Args:
        split: the present nodes of each stage, with the seconds *measured* on them.
        generation: profile of generation, at any rollout length.
        training: profile of training.
        unit: nodes of one data-parallel unit.
        num_nodes: all nodes; those not in the split are free.

    Returns:
        The split with the seconds now expected.
    """
    _require_nodes("unit", unit)
    if split.generation_nodes + split.training_nodes + unit > num_nodes:
        return split
    gap = split.generation_seconds - split.training_seconds
    if gap >= 0:
        nodes = split.generation_nodes + unit
        seconds = split.generation_seconds * _gain(generation, split.generation_nodes, nodes)
        grown = replace(split, generation_nodes=nodes, generation_seconds=seconds)
        return grown if gap >= split.generation_seconds - seconds > 0 else split
    nodes = split.training_nodes + unit
    seconds = split.training_seconds * _gain(training, split.training_nodes, nodes)
    grown = replace(split, training_nodes=nodes, training_seconds=seconds)
    return grown if -gap >= split.training_seconds - seconds > 0 else split


def _best_up_to(stage: Seconds, num_nodes: int) -> list[float]:
    """Element k - 1: the minimum seconds on up to k nodes."""
    return list(accumulate(map(stage, range(1, num_nodes + 1)), min))


def _fewest(best_up_to: Sequence[float], seconds: float) -> int:
    return next(nodes for nodes, best in enumerate(best_up_to, 1) if best <= seconds)


def _closest(stage: Seconds, num_nodes: int, seconds: float) -> int:
    return min(range(1, num_nodes + 1), key=lambda nodes: abs(stage(nodes) - seconds))


def _gain(stage: Seconds, before: int, after: int) -> float:
    """Ratio of the seconds on `after` nodes to those on `before` nodes."""
    return stage(after) / stage(before)


def _split(generation: Seconds, x: int, training: Seconds, y: int) -> Split:
    return Split(
        generation_nodes=x,
        training_nodes=y,
        generation_seconds=generation(x),
        training_seconds=training(y),
    )


def _require_nodes(field: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{field} is {value}: give at least 1")
