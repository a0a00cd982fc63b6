"""The measured times of a gang's newest batches, and the advice that was drawn from them.

`policy/split_advice.py` says what the times mean and draws the advice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean

KEPT_BATCHES = 5
"""The newest batches that are kept: those that must agree before the advice changes."""


class SplitAdvice(StrEnum):
    UNKNOWN = "unknown"
    KEEP = "keep"
    ADD_GENERATION = "add_generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCounts:
    """The nodes that work for a gang's run."""

    generating: int
    """Nodes that generate permanently."""
    training: int
    lent: int = 0
    """Nodes of the gang that generate while it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimes:
    """The times of one batch, and the nodes that generated it."""

    node_counts: NodeCounts
    waited: float
    trained: float
    """T_train: seconds the gang trained."""
    load: float = 1.0
    """Share of what the nodes can sample that they sampled meanwhile."""
    tokens: int = 0

    @property
    def seconds(self) -> float:
        """T_gen, or an upper bound of it."""
        return self.waited + self.trained

    @property
    def without_lent(self) -> BatchTimes:
        """The batch as if the nodes that generate permanently had done what lent ones did."""
        counts = self.node_counts
        if not counts.lent or not counts.generating:
            return self
        waited = self.waited * (1 + counts.lent / counts.generating)
        return replace(self, node_counts=replace(counts, lent=0), waited=waited)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBalance:
    """The measured times of a gang's newest batches, and the advice from them."""

    advice: SplitAdvice = SplitAdvice.UNKNOWN
    batches: tuple[BatchTimes, ...] = ()
    """The newest batches with the same node counts, at most five."""
    node_counts: NodeCounts | None = None
    """When the gang finished its last batch; None: it has not finished one yet."""
    done_time: float | None = None
    """When that was, seconds since 1970."""
    full_time: float | None = None
    """When the current batch was full; None: the gang waits for it."""
    generation_points: tuple[tuple[int, float], ...] = ()
    """Measured profile of generation: nodes and seconds of a token, ascending; of a batch if its
    tokens are unknown."""
    training_points: tuple[tuple[int, float], ...] = ()
    """Measured profile of training."""
    advised_nodes: int = 0
    """Nodes that the gang should train on; 0: no advice."""

    def full(self, now: float) -> StageBalance:
        """The batch is full, if the gang waited for one."""
        return self if self.full_time is not None else replace(self, full_time=now)

    def done(
        self, node_counts: NodeCounts, now: float, *, load: float = 1.0, tokens: int = 0
    ) -> StageBalance:
        """The gang finished its batch; `node_counts` generate the next one. The advice stays."""
        if self.full_time is None:
            return self
        finished = (*self.batches, *self._ended(self.full_time, now, load, tokens))
        batches = finished[-KEPT_BATCHES:] if self._is_of(node_counts) else ()
        return replace(
            self, batches=batches, node_counts=node_counts, done_time=now, full_time=None
        )

    def waits(self) -> StageBalance:
        """The gang waits for its batch again: it was not full."""
        return replace(self, full_time=None)

    @property
    def cause(self) -> str:
        """The advice with its quantities, for people."""
        if self.advice is SplitAdvice.UNKNOWN or self.node_counts is None:
            return f"{self.advice}: not measured with these nodes yet"
        return (
            f"{self.advice}: T_gen {self.generation_seconds:.3g} s with "
            f"{self.node_counts.generating} nodes, T_train {self.training_seconds:.3g} s with "
            f"{self.node_counts.training}; means of {len(self.batches)} batches"
        )

    @property
    def generation_seconds(self) -> float:
        """Mean T_gen; needs a batch."""
        return fmean(batch.seconds for batch in self.batches)

    @property
    def training_seconds(self) -> float:
        """Mean T_train; needs a batch."""
        return fmean(batch.trained for batch in self.batches)

    def _is_of(self, node_counts: NodeCounts) -> bool:
        """Whether the node counts are unchanged, apart from lent nodes."""
        return self.node_counts is not None and self.node_counts == replace(
            node_counts, lent=self.node_counts.lent
        )

    def _ended(
        self, full_time: float, now: float, load: float, tokens: int
    ) -> tuple[BatchTimes, ...]:
        """The batch that ends now, if it was measured."""
        node_counts, done_time = self.node_counts, self.done_time
        if node_counts is None or done_time is None or not done_time <= full_time < now:
            return ()
        batch = BatchTimes(
            node_counts=node_counts,
            waited=full_time - done_time,
            trained=now - full_time,
            load=load,
            tokens=tokens,
        )
        return (batch,) if node_counts.generating + node_counts.lent else ()
