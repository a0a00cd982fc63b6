"""What is known of the lending of a gang's nodes: measured cycles, and the newest decision.

`policy/lending.py` decides from it; a cycle lasts from one release to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

_DECAY = 0.9
"""Weight of earlier measurements, against 1 for the newest cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForecast:
    """The rollouts that a batch lacks when a gang releases its nodes."""

    remaining_rollouts: int
    """R: rollouts of the next batch that have not ended."""
    batch_rollouts: int
    """B: rollouts of a whole batch, above 0."""
    done_rollouts: int = 0
    done_tokens: int = 0

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
    weight: float = 0.0

    @property
    def value(self) -> float | None:
        """The mean per unit of weight; None: never measured."""
        return self.total / self.weight if self.weight else None

    def after(self, total: float, weight: float) -> DecayedMean:
        """The mean after one more measurement; 0 and 0: a cycle of the other mode, only decay."""
        return DecayedMean(total=_DECAY * self.total + total, weight=_DECAY * self.weight + weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingDecision:
    lend: bool
    """True: lend the nodes; False: keep them for the gang."""
    cause: str = ""
    """Why, with each quantity, for people."""
    measured: bool = True
    """Whether the cycle that follows is a measurement of its mode; not where there is no choice."""


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
    since: float | None = None
    """Start of the present cycle, seconds since 1970; None: it is not measured."""
    forecast: BatchForecast | None = None
    """The forecast at that time; None: the gang no longer waits for the batch."""
    batches: int = 0
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
        return replace(self, since=None, forecast=None, batches=0)
