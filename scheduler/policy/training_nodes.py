"""How many nodes a gang should train on, from measured batches: StreamRL's allocation that acts.

StreamRL (arXiv 2504.15930): Alg. 1 splits the nodes of a run between generation and training by a
profile of both stages, and dynamic adjustment moves one data-parallel unit at a time while the run
goes on. Here the profile comes from steps that ran: seconds of a token, so that batches of other
lengths compare. A stage's seconds on other numbers of nodes are those measured now, times the ratio
that was measured between the two; beyond measured numbers scaling is assumed to be perfect, until a
move there has measured it.

A unit moves if for several batches in a row the best split is faster by a margin (hysteresis).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from scheduler.model.records import Gang
from scheduler.model.stage_balance import BatchTimes, StageBalance
from scheduler.policy.node_split import Seconds, StageProfile, split_nodes

_WAITED = 0.05
"""Share of a batch's time that a gang waits for it at least, if generation is the slower stage."""
_LEAST_LOAD = 0.01
"""Of a batch in which nothing was sampled, as all of it was there."""
_BACK = 2.0
"""Times the usual gain for a move to where the gang was: it left for a reason, and may again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """When a unit moves, and how far."""

    min_nodes: int = 1
    max_nodes: int
    gain: float = 0.05
    """Share of the seconds of a batch that the best split must save."""
    batches: int = 3
    """Batches in a row that must agree, after the first one with a number of nodes."""


def advised(balance: StageBalance, gang: Gang, rule: SplitRule) -> StageBalance:
    """The balance with the number of nodes that the gang should train on, and a newer profile.

    The number stays while batches disagree, and while too few were measured.
    """
    counts = balance.node_counts
    if counts is None or not counts.generating or len(balance.batches) <= rule.batches:
        return balance
    newest = [batch.without_lent for batch in balance.batches[-rule.batches :]]
    balance = _profiled(balance, newest)
    moves = {_move(batch, balance, gang, rule) for batch in newest}
    move = moves.pop() if len(moves) == 1 else 0
    return replace(balance, advised_nodes=counts.training + move) if move else balance


def cause(balance: StageBalance, gang: Gang) -> str:
    """From what to what, with the quantities, for people."""
    counts = balance.node_counts
    if counts is None or not balance.batches:
        return f"{balance.advised_nodes} training nodes"
    newest = balance.batches[-1].without_lent
    nodes = counts.training, balance.advised_nodes
    others = counts.generating + counts.training - nodes[1]
    pace = _pace(newest, balance, nodes[1])
    return (
        f"gang {gang.gang_id}: {nodes[0]} -> {nodes[1]} training nodes: "
        f"T_gen {_generated(newest):.3g} s with {counts.generating}, T_train "
        f"{newest.trained:.3g} s with {nodes[0]}; "
        f"expected {pace:.3g} s with {others} and {nodes[1]}"
    )


def _generated(batch: BatchTimes) -> float:
    """T_gen of a batch: of one that training throttled, the share that it sampled in."""
    waits = batch.waited > _WAITED * batch.seconds
    return batch.seconds if waits else batch.seconds * max(batch.load, _LEAST_LOAD)


def _move(batch: BatchTimes, balance: StageBalance, gang: Gang, rule: SplitRule) -> int:
    """Nodes to add to training: a unit, none, or less a unit."""
    counts, unit = batch.node_counts, gang.unit_nodes
    least, most = rule.min_nodes, min(rule.max_nodes, gang.max_nodes)
    if counts.training > most:
        return -unit if counts.training - unit >= least else 0
    if counts.training < least:
        return unit if counts.training + unit <= most and counts.generating > unit else 0
    generation, training = _stages(batch, balance)

    def within(nodes: int) -> float:
        is_whole = least <= nodes <= most and (nodes - counts.training) % unit == 0
        return training(nodes) if is_whole else math.inf

    try:
        best = split_nodes(generation, within, counts.generating + counts.training)
    except ValueError:  # the bounds leave nothing
        return 0
    if best.training_nodes == counts.training:
        return 0
    present = max(_generated(batch), batch.trained)
    move = unit if best.training_nodes > counts.training else -unit
    if _pace(batch, balance, counts.training + move) >= present:
        return 0
    goes_back = any(nodes == counts.training + move for nodes, _ in balance.training_points)
    gain = rule.gain * (_BACK if goes_back else 1)
    return move if best.seconds <= (1 - gain) * present else 0


def _pace(batch: BatchTimes, balance: StageBalance, num_training: int) -> float:
    """Expected seconds of a batch with another number of training nodes."""
    generation, training = _stages(batch, balance)
    counts = batch.node_counts
    others = counts.generating + counts.training - num_training
    return max(generation(others), training(num_training)) if others > 0 else math.inf


def _stages(batch: BatchTimes, balance: StageBalance) -> tuple[Seconds, Seconds]:
    counts = batch.node_counts
    return (
        _scaled(balance.generation_points, counts.generating, _generated(batch)),
        _scaled(balance.training_points, counts.training, batch.trained),
    )


def _scaled(points: Sequence[tuple[int, float]], nodes: int, seconds: float) -> Seconds:
    """Seconds by number of nodes, of which `nodes` take `seconds`."""
    table = dict(points)
    profile = StageProfile.of(table)
    least, most = min(table), max(table)

    def of(number: int) -> float:
        inside = min(max(number, least), most)
        return profile.seconds(inside) * inside / number

    return lambda number: seconds * of(number) / of(nodes)


def _profiled(balance: StageBalance, newest: Sequence[BatchTimes]) -> StageBalance:
    """The profile with the means of the newest batches."""
    counts = newest[0].node_counts
    generated = fmean(_generated(batch) / (batch.tokens or 1) for batch in newest)
    trained = fmean(batch.trained / (batch.tokens or 1) for batch in newest)
    generation, training = dict(balance.generation_points), dict(balance.training_points)
    return replace(
        balance,
        generation_points=_points(generation, counts.generating, generated),
        training_points=_points(training, counts.training, trained),
    )


def _points(
    table: Mapping[int, float], nodes: int, seconds: float
) -> tuple[tuple[int, float], ...]:
    """The table with a new measurement, which others must not contradict.

    Where there was one for as many nodes, costs have drifted since: all are scaled by as much.
    """
    drift = seconds / table[nodes] if nodes in table else 1.0
    scaled = {number: drift * each for number, each in table.items()} | {nodes: seconds}
    fits = {
        number: each
        for number, each in scaled.items()
        if number == nodes or (number < nodes) == (each > seconds)
    }
    return tuple(sorted(fits.items()))
