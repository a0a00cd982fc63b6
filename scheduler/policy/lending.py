"""Whether to lend a gang's idle nodes to rollout, decided from measured batch times.

There are two modes: nodes that a gang releases are kept for it, or they are lent. The cost of
lending comes late (switches, turns that migrate back, prompts prefilled again), so modes are
compared over whole cycles, from one release to the next, in seconds per batch: T_ded kept, T_full
lent. While T_full is not measured, PEARL's gate decides whether to try lending:
(R / B) * (T_gen - T_gen / S) > T_toggle, where R of the B rollouts of a batch have not ended, T_gen
is the time to generate a batch without the lent nodes, and S their speed-up; only a part of the
gain of perfect scaling is assumed.

KEPT for a block -> LENT for a block, if the expected gain pays -> the faster mode; rarely the other
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from statistics import fmean

from scheduler.model.lending_state import (
    BatchForecast,
    DecayedMean,
    LendingDecision,
    LendingState,
)
from scheduler.model.records import ROLLOUT, Node

_BLOCK = 3
"""Cycles before a mode is compared. The first is not measured: the mode before it affects it."""
_MARGIN = 0.02
"""The other mode must be faster by this share, or be expected to be."""
_CLEAR_MARGIN = 0.1
"""The mode changes within its block if the other is faster by this share."""
_SCALING = 0.75
"""Assumed part of perfect scaling while lending is not measured."""
_ASSUMED_LOSS = 0.4
"""Assumed worst share by which lending lengthens a cycle while it is not measured."""
_BUDGET = 0.01
"""Share of all time that may be lost by retrying the slower mode."""
_MIN_RETRY_CYCLES = 12
_MAX_RETRY_CYCLES = 256
"""Cycles between two tries, for any loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingInputs:
    """The inputs of a lending decision, apart from measurements."""

    forecast: BatchForecast
    """Rollouts that generation has still to do."""
    num_dedicated: int
    """Nodes that generate for the run, without the gang's."""
    num_lent: int
    """Nodes of the gang that could be lent."""
    round_trip_seconds: float
    """T_toggle: a switch to rollout and one back to the gang's tag; 0: never measured."""


def decide_lending(state: LendingState, inputs: LendingInputs) -> LendingDecision:
    """Decide a release; called after `end_cycle` of the cycle before."""
    if (decision := _without_choice(inputs)) is not None:
        return decision
    lend, detail = _choose(state, inputs)
    means = f"T_ded {_seconds(state.dedicated)}, T_full {_seconds(state.full)}"
    cause = f"{'lent' if lend else 'kept'}: {detail}; {means}"
    return LendingDecision(lend=lend, cause=cause)


def _without_choice(inputs: LendingInputs) -> LendingDecision | None:
    """The decision where generation needs the nodes, or has nothing for them."""
    if inputs.num_dedicated == 0:
        cause = "lent: no other node generates"
        return LendingDecision(lend=True, cause=cause, measured=False)
    if inputs.forecast.remaining_rollouts == 0:
        cause = "kept: no rollout of the batch remains"
        return LendingDecision(lend=False, cause=cause, measured=False)
    return None


def _choose(state: LendingState, inputs: LendingInputs) -> tuple[bool, str]:
    """Whether to lend, and why."""
    dedicated, full = state.dedicated.value, state.full.value
    present, other = (full, dedicated) if state.lends else (dedicated, full)
    margin = _MARGIN if state.cycles >= _BLOCK else _CLEAR_MARGIN
    if state.cycles > 1 and present and other and present > (1 + margin) * other:
        return not state.lends, "the other mode is faster"
    if state.cycles < _BLOCK:
        detail = f"cycle {state.cycles + 1} of {_BLOCK} before modes are compared"
        return state.lends, detail
    if dedicated is None or present is None:
        return False, "to measure a batch without lending"
    if other is None:
        return _expected_gain(state, inputs, dedicated)
    cycles = _retry_cycles(loss=other / present - 1)
    if state.cycles >= cycles:
        detail = f"to measure the other mode again after {state.cycles} cycles"
        return not state.lends, detail
    detail = f"cycle {state.cycles + 1} of {cycles} before the other mode is tried"
    return state.lends, detail


def _retry_cycles(loss: float) -> int:
    """Cycles between tries of a mode whose cycles take longer by the share `loss`."""
    return min(max(round(_BLOCK * loss / _BUDGET), _MIN_RETRY_CYCLES), _MAX_RETRY_CYCLES)


def _expected_gain(
    state: LendingState, inputs: LendingInputs, dedicated: float
) -> tuple[bool, str]:
    """PEARL's gate, with measured means and the assumed speed-up of lent nodes."""
    alone, share = state.generation.value or 0.0, state.share.value or 0.0
    together = alone * inputs.num_dedicated / (inputs.num_dedicated + inputs.num_lent)
    cost, margin = inputs.round_trip_seconds, _MARGIN * dedicated
    # After enough cycles a failed try is within the budget, so assume perfect scaling.
    scaling = _SCALING if state.cycles < _retry_cycles(_ASSUMED_LOSS) else 1.0
    pays = scaling * share * (alone - together) > cost + margin
    formula = f"{scaling:g} * {share:.2g} * ({alone:.3g} - {together:.3g}) s"
    sign = ">" if pays else "<="
    return pays, f"expected gain {formula} {sign} switches {cost:.3g} s + margin {margin:.2g} s"


def _seconds(mean: DecayedMean) -> str:
    return "not measured" if mean.value is None else f"{mean.value:.3g} s"


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
