"""Whether one more node should generate for a run, by what its batches really took.

StreamRL's dynamic adjustment (arXiv 2504.15930) while a run goes on, as advice: with
δ = T_gen - T_train and δ' what one more unit takes off T_gen, generation gets a unit when δ >= δ'
(`planning.allocation.adjusted`). The scheduler knows of a batch when its gang began to wait for it,
when it was full, and when the gang had done with it. From that:

- T_train is the time from full to done; it contains a switch back and a wait for nodes, if any.
- T_gen is the time from one batch to the next: both stages run at once, and the slower one sets the
  pace. Where training is slower it is a bound only, since generation that is ahead is held back by
  the staleness bound. δ is 0 then. For the same reason nothing can be said of a unit for training.
- There is no profile, so δ' is that of perfect scaling: the most that a unit can take off.
  Generation stays the slower stage, as the rule wants it; a long tail may leave less of the gain.
- Nodes lent while their gang waits generate with the others. The rule holds for all of them
  together, since T_train bounds the pace with them as well as without.

A unit is a node. `Balance`: done -> waits -> full -> done, a batch each time around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean

from scheduler.model.node_split import Split, adjusted

__all__ = ["Advice", "Balance", "Batch", "Team", "advised", "pays"]

_AGREEING = 5
"""Batches in a row that must agree before the advice changes."""


class Advice(StrEnum):
    """What an operator, or an autoscaler, should do."""

    UNKNOWN = "unknown"
    KEEP = "keep"
    ADD_GENERATION = "add_generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The nodes that work for a gang's run."""

    generating: int
    """Nodes that generate all the time."""
    training: int
    """Nodes of the gang."""
    lent: int = 0
    """Nodes of the gang that generate while it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one batch took, and who made it."""

    team: Team
    """While it was waited for."""
    waited: float
    """Seconds in which the gang had nothing to do."""
    trained: float
    """T_train: seconds in which it had."""

    @property
    def seconds(self) -> float:
        """T_gen, or a bound of it: see above."""
        return self.waited + self.trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """What was measured of a gang's newest batches, and what follows from it."""

    advice: Advice = Advice.UNKNOWN
    """The present advice."""
    batches: tuple[Batch, ...] = ()
    """The newest ones that this team made, at most five."""
    team: Team | None = None
    """As the gang was done with its last batch; None: it has not been yet."""
    done_time: float | None = None
    """When that was, seconds since 1970."""
    full_time: float | None = None
    """When the batch it works on was full; None: it waits."""

    def full(self, now: float) -> Balance:
        """The batch that the gang waits for, if it waits for one, is full."""
        return self if self.full_time is not None else replace(self, full_time=now)

    def done(self, team: Team, now: float) -> Balance:
        """The gang has done with its batch; `team` makes the next one."""
        if self.full_time is None:
            return self
        ended = (*self.batches, *self._ended(self.full_time, now))
        batches = ended[-_AGREEING:] if self._is_of(team) else ()
        return Balance(
            advice=advised(batches, self.advice), batches=batches, team=team, done_time=now
        )

    def waits(self) -> Balance:
        """The gang waits for its batch again, which was not full after all."""
        return replace(self, full_time=None)

    @property
    def cause(self) -> str:
        """The advice with its quantities, for people."""
        if self.advice is Advice.UNKNOWN or self.team is None:
            return f"{self.advice}: not measured with these nodes yet"
        return (
            f"{self.advice}: T_gen {self.generation_seconds:.3g} s with "
            f"{self.team.generating} nodes, T_train {self.training_seconds:.3g} s with "
            f"{self.team.training}; means of {len(self.batches)} batches"
        )

    @property
    def generation_seconds(self) -> float:
        """Mean T_gen; needs a batch."""
        return fmean(batch.seconds for batch in self.batches)

    @property
    def training_seconds(self) -> float:
        """Mean T_train; needs a batch."""
        return fmean(batch.trained for batch in self.batches)

    def _is_of(self, team: Team) -> bool:
        """Whether as many nodes did the same; lending comes and goes."""
        return self.team is not None and self.team == replace(team, lent=self.team.lent)

    def _ended(self, full_time: float, now: float) -> tuple[Batch, ...]:
        """The batch that ends now, if it tells anything."""
        team, done_time = self.team, self.done_time
        if team is None or done_time is None or not done_time <= full_time < now:
            return ()
        batch = Batch(team=team, waited=full_time - done_time, trained=now - full_time)
        return (batch,) if team.generating + team.lent else ()


def advised(batches: Sequence[Batch], standing: Advice) -> Advice:
    """The advice after these batches: it changes only when all of them agree."""
    if len(batches) < _AGREEING:
        return Advice.UNKNOWN
    votes = {pays(batch) for batch in batches}
    if len(votes) > 1 and standing is not Advice.UNKNOWN:
        return standing
    return Advice.ADD_GENERATION if votes == {True} else Advice.KEEP


def pays(batch: Batch) -> bool:
    """StreamRL's rule for one batch: δ >= δ', had the pool one node more."""
    team = batch.team
    split = Split(
        generation_nodes=team.generating + team.lent,
        training_nodes=team.training,
        generation_seconds=batch.seconds,
        training_seconds=batch.trained,
    )
    one_more = split.generation_nodes + split.training_nodes + 1
    after = adjusted(split, generation=_perfect, training=_perfect, unit=1, num_nodes=one_more)
    return after.generation_nodes > split.generation_nodes


def _perfect(num_nodes: int) -> float:
    """Seconds of a stage that scales perfectly, in units of one node's."""
    return 1 / num_nodes
