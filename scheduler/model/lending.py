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

from dataclasses import dataclass, field, replace
from enum import StrEnum

__all__ = [
    "BatchForecast",
    "DecayedMean",
    "LendingDecision",
    "LendingInputs",
    "LendingReason",
    "LendingState",
    "decide_lending",
    "follow_advice",
]

_DECAY = 0.9
"""Weight of earlier measurements, against 1 for the newest cycle."""
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


class LendingReason(StrEnum):
    """Why a release was decided as it was."""

    NO_CHOICE = "no choice"
    CONFIGURED = "configured"
    ADVISED = "the rule of dynamic adjustment"
    DECIDED = "decided before for the same batch"
    BLOCK = "the mode's block is not over"
    OTHER_FASTER = "the other mode is faster"
    MEASURE_KEPT = "the kept mode is not measured"
    EXPECTED_GAIN = "expected gain of lending"
    RETRY = "retry of the slower mode"
    FASTER = "the present mode is faster"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForecast:
    """The rollouts that a batch lacks when a gang releases its nodes."""

    remaining_rollouts: int
    """R: rollouts of the next batch that have not ended."""
    batch_rollouts: int
    """B: rollouts of a whole batch, above 0."""
    done_rollouts: int = 0
    """Rollouts of batches finished since the last release; 0: unspecified."""

    @property
    def share(self) -> float:
        """R / B."""
        return self.remaining_rollouts / self.batch_rollouts

    @property
    def done(self) -> float:
        """Batches finished since the last release; 0: unspecified."""
        return self.done_rollouts / self.batch_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class DecayedMean:
    """A mean with exponentially decayed weights.

    A ratio of sums, not a mean of ratios: the last straggler of a batch, measured alone, is not
    representative of a whole batch and gets a small weight.
    """

    total: float = 0.0
    """Decayed sum of measurements."""
    weight: float = 0.0
    """Decayed sum of their weights."""

    @property
    def value(self) -> float | None:
        """The mean per unit of weight; None: never measured."""
        return self.total / self.weight if self.weight else None

    def after(self, total: float, weight: float) -> DecayedMean:
        """The mean after one more measurement; 0 and 0: a cycle of the other mode, only decay."""
        return DecayedMean(total=_DECAY * self.total + total, weight=_DECAY * self.weight + weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingInputs:
    """The inputs of a lending decision, apart from measurements."""

    forecast: BatchForecast
    """Rollouts that generation has still to do."""
    num_dedicated: int
    """Nodes that generate for the run, without the gang's."""
    num_lent: int
    """Nodes of the gang that could be lent."""
    toggle_seconds: float
    """T_toggle: a switch to rollout and one back to the gang's tag; 0: never measured."""
    advised: bool | None = None
    """Whether the rule of dynamic adjustment (`split_advice.py`) gives generation one more node
    than the dedicated ones; None: not measured, or the newest batches disagree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingDecision:
    """The decision for one release."""

    lend: bool
    """True: lend the nodes; False: keep them for the gang."""
    reason: LendingReason
    """Why."""
    cause: str = ""
    """Why, with each quantity, for people."""

    @property
    def measured(self) -> bool:
        """Whether the cycle that follows is a measurement of its mode."""
        return self.reason is not LendingReason.NO_CHOICE


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingState:
    """The measurements of one gang, and its present mode.

    Its changes: `start_cycle` and `end_cycle` with each release, `request_batch` and `batch_full`
    with each batch of a cycle, `abandon_cycle`.
    """

    dedicated: DecayedMean = field(default_factory=DecayedMean)
    """T_ded: seconds per batch of whole cycles in which the nodes were kept."""
    full: DecayedMean = field(default_factory=DecayedMean)
    """T_full: seconds per batch of whole cycles in which they were lent."""
    generation: DecayedMean = field(default_factory=DecayedMean)
    """T_gen: seconds of waiting per batch waited for, while they were kept."""
    share: DecayedMean = field(default_factory=DecayedMean)
    """R / B of those waits."""
    lends: bool = False
    """The present mode: True while nodes are lent."""
    cycles: int = 0
    """Cycles ended in the present mode."""
    since: float | None = None
    """Start of the present cycle, seconds since 1970; None: it is not measured."""
    forecast: BatchForecast | None = None
    """The forecast at that time; None: the gang no longer waits for the batch."""
    batches: int = 0
    """Batches requested in the present cycle."""
    batch: int = 0
    """Number of the newest batch, waited for or requested; 0: unspecified."""

    def is_decided(self, batch: int) -> bool:
        """Whether the present cycle was decided for the batch with this number."""
        return self.since is not None and 0 < batch == self.batch

    def start_cycle(
        self, decision: LendingDecision, forecast: BatchForecast, now: float, batch: int = 0
    ) -> LendingState:
        """The nodes were released at `now` until `batch`, as decided."""
        if not decision.measured:
            return self.abandon_cycle()
        cycles = self.cycles if decision.lend == self.lends else 0
        return replace(
            self,
            lends=decision.lend,
            cycles=cycles,
            since=now,
            forecast=forecast,
            batches=0,
            batch=batch,
        )

    def request_batch(self, batch: int = 0) -> LendingState:
        """The gang requested its nodes for a batch; idempotent for the same number."""
        if self.batches and 0 < batch == self.batch:
            return self
        return replace(self, batches=self.batches + 1, batch=batch)

    def batch_full(self, now: float) -> LendingState:
        """The batch that the gang waited for was full at `now`."""
        if self.since is None or self.forecast is None:
            return self
        done = replace(self, forecast=None)
        if self.lends or not self.cycles or now <= self.since:
            return done
        share = self.forecast.share
        return replace(
            done,
            generation=self.generation.after(now - self.since, share),
            share=self.share.after(share, 1),
        )

    def end_cycle(self, now: float, num_done: float = 0.0) -> LendingState:
        """The nodes are released again at `now`, after `num_done` batches; 0: all requested."""
        if self.since is None or self.batches == 0 or now <= self.since:
            return self.abandon_cycle()
        done = replace(self.abandon_cycle(), cycles=self.cycles + 1)
        if self.cycles == 0:
            return done
        measured, nothing = (now - self.since, num_done or self.batches), (0.0, 0.0)
        return replace(
            done,
            full=self.full.after(*(measured if self.lends else nothing)),
            dedicated=self.dedicated.after(*(nothing if self.lends else measured)),
        )

    def abandon_cycle(self) -> LendingState:
        """Discard the measurement of the present cycle."""
        return replace(self, since=None, forecast=None, batches=0)


def decide_lending(state: LendingState, inputs: LendingInputs) -> LendingDecision:
    """Decide a release; called after `end_cycle` of the cycle before."""
    if (decision := _without_choice(inputs)) is not None:
        return decision
    lend, reason, detail = _choose(state, inputs)
    means = f"T_ded {_seconds(state.dedicated)}, T_full {_seconds(state.full)}"
    cause = f"{'lent' if lend else 'kept'}: {detail}; {means}"
    return LendingDecision(lend=lend, reason=reason, cause=cause)


def follow_advice(state: LendingState, inputs: LendingInputs) -> LendingDecision:
    """Decide a release as dynamic adjustment advises; the mode stays while batches disagree."""
    if (decision := _without_choice(inputs)) is not None:
        return decision
    lend = state.lends if inputs.advised is None else inputs.advised
    detail = {
        True: "one more node should generate",
        False: "generation needs no further node",
        None: "the newest batches do not agree on more than the present mode",
    }[inputs.advised]
    cause = f"{'lent' if lend else 'kept'}: {detail}"
    return LendingDecision(lend=lend, reason=LendingReason.ADVISED, cause=cause)


def _without_choice(inputs: LendingInputs) -> LendingDecision | None:
    """The decision where generation needs the nodes, or has nothing for them."""
    if inputs.num_dedicated == 0:
        cause = "lent: no other node generates"
        return LendingDecision(lend=True, reason=LendingReason.NO_CHOICE, cause=cause)
    if inputs.forecast.remaining_rollouts == 0:
        cause = "kept: no rollout of the batch remains"
        return LendingDecision(lend=False, reason=LendingReason.NO_CHOICE, cause=cause)
    return None


def _choose(state: LendingState, inputs: LendingInputs) -> tuple[bool, LendingReason, str]:
    """Whether to lend, and why."""
    dedicated, full = state.dedicated.value, state.full.value
    present, other = (full, dedicated) if state.lends else (dedicated, full)
    margin = _MARGIN if state.cycles >= _BLOCK else _CLEAR_MARGIN
    if state.cycles > 1 and present and other and present > (1 + margin) * other:
        return not state.lends, LendingReason.OTHER_FASTER, "the other mode is faster"
    if state.cycles < _BLOCK:
        detail = f"cycle {state.cycles + 1} of {_BLOCK} before modes are compared"
        return state.lends, LendingReason.BLOCK, detail
    if dedicated is None or present is None:
        return False, LendingReason.MEASURE_KEPT, "to measure a batch without lending"
    if other is None:
        pays, detail = _expected_gain(state, inputs, dedicated)
        return pays, LendingReason.EXPECTED_GAIN, detail
    cycles = _retry_cycles(loss=other / present - 1)
    if state.cycles >= cycles:
        detail = f"to measure the other mode again after {state.cycles} cycles"
        return not state.lends, LendingReason.RETRY, detail
    detail = f"cycle {state.cycles + 1} of {cycles} before the other mode is tried"
    return state.lends, LendingReason.FASTER, detail


def _retry_cycles(loss: float) -> int:
    """Cycles between tries of a mode whose cycles take longer by the share `loss`."""
    return min(max(round(_BLOCK * loss / _BUDGET), _MIN_RETRY_CYCLES), _MAX_RETRY_CYCLES)


def _expected_gain(
    state: LendingState, inputs: LendingInputs, dedicated: float
) -> tuple[bool, str]:
    """PEARL's gate, with measured means and the assumed speed-up of lent nodes."""
    alone, share = state.generation.value or 0.0, state.share.value or 0.0
    together = alone * inputs.num_dedicated / (inputs.num_dedicated + inputs.num_lent)
    cost, margin = inputs.toggle_seconds, _MARGIN * dedicated
    # After enough cycles a failed try is within the budget, so assume perfect scaling.
    scaling = _SCALING if state.cycles < _retry_cycles(_ASSUMED_LOSS) else 1.0
    pays = scaling * share * (alone - together) > cost + margin
    formula = f"{scaling:g} * {share:.2g} * ({alone:.3g} - {together:.3g}) s"
    sign = ">" if pays else "<="
    return pays, f"expected gain {formula} {sign} switches {cost:.3g} s + margin {margin:.2g} s"


def _seconds(mean: DecayedMean) -> str:
    return "not measured" if mean.value is None else f"{mean.value:.3g} s"
