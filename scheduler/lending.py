"""Whether a gang's nodes shall roll out until it wants them back, judged by what was measured.

The gate is PEARL's: lend when (R / B) * (T_ded - T_full) > T_toggle, where R of the B rollouts of a
batch have not ended, T_ded and T_full are the seconds of a whole batch without and with the lent
nodes, and T_toggle is what the way to rollout and back costs. Every batch is measured; what was not
done for long is tried again, so that a wrong estimate does not live for ever.

UNMEASURED -> lent once -> kept once -> whichever pays, the other one being tried again rarely
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

__all__ = ["Lending", "Outlook", "Pace", "Stake", "Verdict", "judge"]

_MEMORY = 0.8
"""Weight of what was measured before, against 1 for the newest batch."""
_MARGIN = 1.5
"""After a measured loss the gain must be so many times the cost before it is lent again."""
_DOUBT = 0.25
"""A difference below this share of T_ded may be chance, so it is looked at again sooner."""
_PATIENCE_IN_DOUBT = 4
_PATIENCE = 32
"""Releases after which the other way is tried again: a small difference, a clear one."""
_LONGEST_PATIENCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is left of a batch when a gang gives its nodes back."""

    remaining_rollouts: int
    """R: rollouts of the next batch that have not ended."""
    batch_rollouts: int
    """B: rollouts of a whole batch, above 0."""

    @property
    def share(self) -> float:
        """R / B."""
        return self.remaining_rollouts / self.batch_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of generating a whole batch: seconds over batches, the newest weighing most.

    A ratio of sums, not a mean of ratios: the last straggler of a batch, measured alone, says
    little of a whole batch and weighs little.
    """

    seconds: float = 0.0
    """Measured, decayed."""
    batches: float = 0.0
    """Generated meanwhile, decayed."""

    @property
    def mean(self) -> float | None:
        """Seconds of a whole batch; None: never measured."""
        return self.seconds / self.batches if self.batches else None

    def after(self, seconds: float, batches: float) -> Pace:
        """With one more measurement; 0 and 0: of the other way, this one grew older."""
        return Pace(
            seconds=_MEMORY * self.seconds + seconds, batches=_MEMORY * self.batches + batches
        )


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
    pays: bool | None = None
    """What the gate says; differs from `lend` where the other way is tried. None: it cannot say."""
    in_doubt: bool = False
    """The difference is small enough to be chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """What was measured for one gang. Its changes are `begun`, `ended` and `abandoned`."""

    dedicated: Pace = field(default_factory=Pace)
    """T_ded, without the gang's nodes."""
    full: Pace = field(default_factory=Pace)
    """T_full, with them."""
    pays: bool | None = None
    """The gate's last answer."""
    steps: int = 0
    """Releases since the other way was last tried."""
    patience: int = _PATIENCE_IN_DOUBT
    """The other way is tried again after so many releases; doubles each time."""
    lent: bool = False
    """What was done at the last release."""
    since: float | None = None
    """When the batch that is being measured began; None: none is."""
    outlook: Outlook | None = None
    """What was left of it then."""

    def begun(self, verdict: Verdict, outlook: Outlook, now: float) -> Lending:
        """The nodes were given back at `now`, and `verdict` was carried out."""
        steps, patience = self._exploration(verdict)
        return replace(
            self,
            pays=self.pays if verdict.pays is None else verdict.pays,
            steps=steps,
            patience=patience,
            lent=verdict.lend,
            since=now,
            outlook=outlook,
        )

    def ended(self, now: float) -> Lending:
        """The batch was full at `now`."""
        if self.since is None or self.outlook is None:
            return self
        done = self.abandoned()
        seconds, share = now - self.since, self.outlook.share
        if seconds <= 0 or share <= 0:
            return done
        measured, nothing = (seconds, share), (0.0, 0.0)
        return replace(
            done,
            full=self.full.after(*(measured if self.lent else nothing)),
            dedicated=self.dedicated.after(*(nothing if self.lent else measured)),
        )

    def abandoned(self) -> Lending:
        """Nobody will say when the batch was full."""
        return replace(self, since=None, outlook=None)

    def _exploration(self, verdict: Verdict) -> tuple[int, int]:
        if verdict.pays is None:
            return self.steps, self.patience
        if verdict.pays != self.pays:
            return 0, _PATIENCE_IN_DOUBT if verdict.in_doubt else _PATIENCE
        if verdict.pays != verdict.lend:
            return 0, min(2 * self.patience, _LONGEST_PATIENCE)
        return self.steps + 1, self.patience


def judge(lending: Lending, stake: Stake) -> Verdict:
    """Whether to lend. A side that was never measured is estimated, the best case for lending."""
    if stake.num_dedicated == 0:
        return Verdict(lend=True, cause="lent: no other node generates")
    if stake.outlook.remaining_rollouts == 0:
        return Verdict(lend=False, cause="kept: nothing is left to generate")
    dedicated, full = _estimates(lending, stake)
    if dedicated is None or full is None:
        return Verdict(lend=True, cause="lent: nothing was measured yet")
    share, cost = stake.outlook.share, stake.toggle_seconds
    gain = share * (dedicated - full)
    pays = gain > cost * (_MARGIN if lending.pays is False else 1.0)
    formula = f"{share:.2g} * ({dedicated:.3g} - {full:.3g}) s {'>' if gain > cost else '<='}"
    formula += f" {cost:.3g} s"
    if pays and lending.dedicated.mean is None:
        lend, why = False, "to measure a batch without: "
    elif pays == lending.pays and lending.steps >= lending.patience:
        lend, why = not pays, "to measure again: "
    else:
        lend, why = pays, "not by a clear margin: " if gain > cost and not pays else ""
    return Verdict(
        lend=lend,
        cause=f"{'lent' if lend else 'kept'}: {why}{formula}",
        pays=pays,
        in_doubt=abs(dedicated - full) < _DOUBT * dedicated,
    )


def _estimates(lending: Lending, stake: Stake) -> tuple[float | None, float | None]:
    """T_ded and T_full; one that was never measured by perfect scaling from the other."""
    dedicated, full = lending.dedicated.mean, lending.full.mean
    speed_up = 1 + stake.num_lent / stake.num_dedicated
    if dedicated is None and full is not None:
        dedicated = full * speed_up
    elif full is None and dedicated is not None:
        full = dedicated / speed_up
    return dedicated, full
