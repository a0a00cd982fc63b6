"""Whether one more node should generate for a run, from the measured times of its batches.

StreamRL's dynamic adjustment (arXiv 2504.15930) during a run, as advice: with δ = T_gen - T_train
and δ' the reduction of T_gen by one more unit, generation gets a unit when δ >= δ'
(`node_split.adjusted`). The scheduler knows when a gang began to wait for a batch, when the batch
was full, and when the gang finished it. From that:

- T_train is the time from full to done; it includes a switch back and a wait for nodes, if any.
- T_gen is the time from one batch to the next: both stages run concurrently, and the slower one
  sets the pace. If training is slower, T_gen is an upper bound, since the staleness bound throttles
  generation, and δ is 0. For the same reason there is no advice to add nodes for training.
- There is no profile, so δ' is that of perfect scaling: the largest possible reduction. Generation
  stays the slower stage, as the rule requires; with a long tail the actual gain may be smaller.
- Nodes lent while their gang waits generate with the others. The rule holds for all of them
  together, since T_train bounds the pace with or without them.

A unit is a node. `StageBalance`: done -> waits -> full -> done, once per batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.model.stage_balance import (
    KEPT_BATCHES,
    BatchTimes,
    NodeCounts,
    SplitAdvice,
    StageBalance,
)
from scheduler.policy.node_split import Split, adjusted


def finished(
    balance: StageBalance,
    node_counts: NodeCounts,
    now: float,
    *,
    load: float = 1.0,
    tokens: int = 0,
) -> StageBalance:
    """The balance after the gang finished its batch at `now`, with the advice from then on.

    Args:
        balance: before that.
        node_counts: generate the next batch.
        now: seconds since 1970.
        load: share of what the nodes can sample that they sampled meanwhile.
        tokens: of the batch; 0: unknown.
    """
    done = balance.done(node_counts, now, load=load, tokens=tokens)
    return replace(done, advice=advise(done.batches, balance.advice))


def advise(batches: Sequence[BatchTimes], standing: SplitAdvice) -> SplitAdvice:
    """The advice after these batches: it changes only when all of them agree."""
    if len(batches) < KEPT_BATCHES:
        return SplitAdvice.UNKNOWN
    votes = {needs_generation_node(batch) for batch in batches}
    if len(votes) > 1 and standing is not SplitAdvice.UNKNOWN:
        return standing
    return SplitAdvice.ADD_GENERATION if votes == {True} else SplitAdvice.KEEP


def needs_generation_node(batch: BatchTimes) -> bool:
    """StreamRL's rule for one batch: δ >= δ', had the pool one node more."""
    node_counts = batch.node_counts
    split = Split(
        generation_nodes=node_counts.generating + node_counts.lent,
        training_nodes=node_counts.training,
        generation_seconds=batch.seconds,
        training_seconds=batch.trained,
    )
    one_more = split.generation_nodes + split.training_nodes + 1
    after = adjusted(split, generation=_perfect, training=_perfect, unit=1, num_nodes=one_more)
    return after.generation_nodes > split.generation_nodes


def _perfect(num_nodes: int) -> float:
    """Seconds of a stage that scales perfectly, in units of one node's."""
    return 1 / num_nodes
