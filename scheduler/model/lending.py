"""Whether a gang's nodes shall roll out until it wants them back, judged by what was measured.

There are two ways: the nodes that a gang gives back are kept, or they are lent. What lending costs
comes late (switches, rollouts that move back, prompts that are prefilled again), so ways are
compared by whole cycles, from one release to the next, in seconds per batch: T_ded kept, T_full
lent. As long as T_full is not known, PEARL's gate decides whether lending is tried at all:
(R / B) * (T_gen - T_gen / S) > T_toggle, where R of the B rollouts of a batch have not ended, T_gen
is what generating a batch takes without the lent nodes, and S their speed-up; of what it would be
with perfect scaling, a part is believed.

KEPT for a block -> LENT for a block, if that may pay -> the faster way; the other again, rarely
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

__all__ = ["Lending", "Mean", "Outlook", "Stake", "Verdict", "judge"]

_MEMORY = 0.9
"""Weight of what was measured before, against 1 for the newest cycle."""
_BLOCK = 3
"""Cycles before a way is judged. The first is not measured: it begins with what the other left."""
_MARGIN = 0.02
"""The other way must be faster by this share, or promise to be."""
_CLEAR = 0.1
"""A way is left within its block already if the other is faster by this share."""
_SCALING = 0.75
"""Part of perfect scaling that is believed, as long as lending was not measured."""
_FEARED = 0.4
"""Share by which lending may lengthen a cycle, as long as it was not measured."""
_BUDGET = 0.01
"""Share of all time that may be lost by trying the slower way again."""
_LEAST_PATIENCE = 12
_LONGEST_PATIENCE = 256
"""Cycles between two tries, however little and however much they cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is left of a batch when a gang gives its nodes back."""

    remaining_rollouts: int
    """R: rollouts of the next batch that have not ended."""
    batch_rollouts: int
    """B: rollouts of a whole batch, above 0."""
    done_rollouts: int = 0
    """Of the batches that the gang was done with since the outlook before; 0: not told."""

    @property
    def share(self) -> float:
        """R / B."""
        return self.remaining_rollouts / self.batch_rollouts

    @property
    def done(self) -> float:
        """Whole batches' worth of what the gang was done with; 0: not told."""
        return self.done_rollouts / self.batch_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean in which the newest weighs most.

    A ratio of sums, not a mean of ratios: the last straggler of a batch, measured alone, says
    little of a whole batch and weighs little.
    """

    total: float = 0.0
    """Measured, decayed."""
    weight: float = 0.0
    """What it was measured of, decayed."""

    @property
    def value(self) -> float | None:
        """Of a weight of 1; None: never measured."""
        return self.total / self.weight if self.weight else None

    def after(self, total: float, weight: float) -> Mean:
        """With one more measurement; 0 and 0: of the other way, this one grew older."""
        return Mean(total=_MEMORY * self.total + total, weight=_MEMORY * self.weight + weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stake:
    """What is decided about."""

    outlook: Outlook
    """What generation has still to do."""
    num_dedicated: int
    """Nodes that generate for the run without the gang's."""
    num_lent: int
    """Nodes of the gang that could."""
    toggle_seconds: float
    """T_toggle: a switch to rollout and one back to the gang's tag; 0: never measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer for one release."""

    lend: bool
    """What to do."""
    cause: str
    """Why, with each quantity."""
    chosen: bool = True
    """False: there was no choice, so the cycle tells nothing of either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """What was measured for one gang, and which way it is in.

    Its changes: `begun` and `ended` with each cycle, `asked` and `filled` with each batch in it,
    `abandoned`.
    """

    dedicated: Mean = field(default_factory=Mean)
    """T_ded: seconds per batch of whole cycles in which the nodes were kept."""
    full: Mean = field(default_factory=Mean)
    """T_full: the same of those in which they were lent."""
    generation: Mean = field(default_factory=Mean)
    """T_gen: seconds of waiting, while they were kept, per batch that was waited for."""
    share: Mean = field(default_factory=Mean)
    """R / B of those waits: the part of a batch that was."""
    lends: bool = False
    """The present way."""
    cycles: int = 0
    """That ended since the way was taken."""
    since: float | None = None
    """When the present cycle began; None: it is not measured."""
    outlook: Outlook | None = None
    """What was left of a batch then; None: the gang does not wait any more."""
    batches: int = 0
    """For which the gang asked in the present cycle."""
    batch: int = 0
    """Number of the newest one: waited for, then asked for; 0: not told."""

    def is_judged(self, batch: int) -> bool:
        """Whether the verdict of the present cycle is that of the batch with this number."""
        return self.since is not None and 0 < batch == self.batch

    def begun(self, verdict: Verdict, outlook: Outlook, now: float, batch: int = 0) -> Lending:
        """The nodes were given back at `now` until `batch`, and `verdict` was carried out."""
        if not verdict.chosen:
            return self.abandoned()
        cycles = self.cycles if verdict.lend == self.lends else 0
        return replace(
            self,
            lends=verdict.lend,
            cycles=cycles,
            since=now,
            outlook=outlook,
            batches=0,
            batch=batch,
        )

    def asked(self, batch: int = 0) -> Lending:
        """The gang wants its nodes for a batch; again for the same number changes nothing."""
        if self.batches and 0 < batch == self.batch:
            return self
        return replace(self, batches=self.batches + 1, batch=batch)

    def filled(self, now: float) -> Lending:
        """The batch that the gang waited for was full at `now`."""
        if self.since is None or self.outlook is None:
            return self
        done = replace(self, outlook=None)
        if self.lends or not self.cycles or now <= self.since:
            return done
        share = self.outlook.share
        return replace(
            done,
            generation=self.generation.after(now - self.since, share),
            share=self.share.after(share, 1),
        )

    def ended(self, now: float, num_done: float = 0.0) -> Lending:
        """The nodes are given back again at `now`, after so many batches; 0: all asked for."""
        if self.since is None or self.batches == 0 or now <= self.since:
            return self.abandoned()
        done = replace(self.abandoned(), cycles=self.cycles + 1)
        if self.cycles == 0:
            return done
        measured, nothing = (now - self.since, num_done or self.batches), (0.0, 0.0)
        return replace(
            done,
            full=self.full.after(*(measured if self.lends else nothing)),
            dedicated=self.dedicated.after(*(nothing if self.lends else measured)),
        )

    def abandoned(self) -> Lending:
        """The present cycle tells nothing."""
        return replace(self, since=None, outlook=None, batches=0)


def judge(lending: Lending, stake: Stake) -> Verdict:
    """Whether to lend; asked at each release, after the cycle before has `ended`."""
    if stake.num_dedicated == 0:
        return Verdict(lend=True, cause="lent: no other node generates", chosen=False)
    if stake.outlook.remaining_rollouts == 0:
        return Verdict(lend=False, cause="kept: nothing is left to generate", chosen=False)
    lend, why = _choice(lending, stake)
    means = f"T_ded {_seconds(lending.dedicated)}, T_full {_seconds(lending.full)}"
    return Verdict(lend=lend, cause=f"{'lent' if lend else 'kept'}: {why}; {means}")


def _choice(lending: Lending, stake: Stake) -> tuple[bool, str]:
    """Whether to lend, and why."""
    dedicated, full = lending.dedicated.value, lending.full.value
    present, other = (full, dedicated) if lending.lends else (dedicated, full)
    margin = _MARGIN if lending.cycles >= _BLOCK else _CLEAR
    if lending.cycles > 1 and present and other and present > (1 + margin) * other:
        return not lending.lends, "the other way is faster"
    if lending.cycles < _BLOCK:
        return lending.lends, f"cycle {lending.cycles + 1} of {_BLOCK} before it is judged"
    if dedicated is None or present is None:
        return False, "to measure a batch without"
    if other is None:
        return _may_pay(lending, stake, dedicated)
    patience = _patience(loss=other / present - 1)
    if lending.cycles >= patience:
        return not lending.lends, f"to measure it again after {lending.cycles} cycles"
    return lending.lends, f"cycle {lending.cycles + 1} of {patience} before the other is tried"


def _patience(loss: float) -> int:
    """Cycles between tries of a way whose cycles take longer by the share `loss`."""
    return min(max(round(_BLOCK * loss / _BUDGET), _LEAST_PATIENCE), _LONGEST_PATIENCE)


def _may_pay(lending: Lending, stake: Stake, dedicated: float) -> tuple[bool, str]:
    """PEARL's gate by the means of what was measured, and the speed-up that lent nodes promise."""
    alone, share = lending.generation.value or 0.0, lending.share.value or 0.0
    together = alone * stake.num_dedicated / (stake.num_dedicated + stake.num_lent)
    cost, margin = stake.toggle_seconds, _MARGIN * dedicated
    # Whoever has gone on for so long can afford to find out, and a gain is not missed for ever.
    believed = _SCALING if lending.cycles < _patience(_FEARED) else 1.0
    pays = believed * share * (alone - together) > cost + margin
    formula = f"{believed:g} * {share:.2g} * ({alone:.3g} - {together:.3g}) s"
    return pays, f"promised {formula} {'>' if pays else '<='} {cost:.3g} + {margin:.2g} s"


def _seconds(mean: Mean) -> str:
    return "not measured" if mean.value is None else f"{mean.value:.3g} s"
