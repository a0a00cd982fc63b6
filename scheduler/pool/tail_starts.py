"""R_t and m of each gang at run time, from what nodes and gangs measure.

    lengths, seconds of a token     of the gang's newest batches, from its releases
    decode latency, slots           of the run's nodes, from their heartbeats
    seconds of a switch             of the gang's nodes

The measurements are in memory. A scheduler that starts takes over the last decision of each gang
and keeps to it until it has measured again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from scheduler.model.records import ROLLOUT, Gang, GangKey, Node, State, Tail
from scheduler.policy.lending import round_trip_seconds
from scheduler.policy.tail_migration import Engines, GangCosts, MeasuredBatch, best_tail
from services.chassis import metrics
from services.lib.decode_latency import MeasuredLatency

_BATCHES = 4
"""Newest batches whose groups are drawn from."""
_MOST_DRAWS = 16
"""Batches that are simulated: one alone may have an odd tail, and a late start costs most."""
_DRAWN_ROLLOUTS = 4096
"""Of all these batches together; a single one may be larger."""


@dataclass(slots=True)
class _Measured:
    """Of one gang."""

    batches: deque[MeasuredBatch] = field(default_factory=lambda: deque(maxlen=_BATCHES))
    number: int = 0
    tail: Tail | None = None


class TailStarts:
    """Decides with each release when the gang begins with its next batch."""

    def __init__(self) -> None:
        self._latencies: dict[str, MeasuredLatency] = defaultdict(MeasuredLatency)
        self._gangs: dict[GangKey, _Measured] = {}
        names = ("run_id", "gang_id")
        self._remaining = metrics.gauge(
            "scheduler",
            "tail_rollouts",
            "R_t: rollouts of a batch that remain when the gang begins with it.",
            names,
        )
        self._num_kept = metrics.gauge(
            "scheduler", "tail_nodes", "m: nodes that are enough to generate these.", names
        )

    def observe(self, node: Node) -> None:
        """A node that generates has reported its rate."""
        if node.report is not None and node.assignment.tag == ROLLOUT and node.taken_up:
            report = node.report
            self._latencies[node.assigned_run].add(
                report.num_turns, report.max_running, report.tokens_per_second
            )

    def forget(self, key: GangKey) -> None:
        """The gang has released its nodes for good."""
        if self._gangs.pop(key, _Measured()).tail is not None:
            self._remaining.remove(*key)
            self._num_kept.remove(*key)

    def num_nodes(self, key: GangKey, state: State) -> int:
        """m, if the tail lasts longer than nodes take to leave the run and return; else 0."""
        tail = state.tails.get(key)
        nodes = [node for node in state.nodes.values() if key[0] in node.runs_for(ROLLOUT)]
        if tail is None or tail.gang_seconds <= round_trip_seconds(nodes, ROLLOUT):
            return 0
        return tail.num_kept

    async def after_release(
        self, before: State, after: State, key: GangKey, number: int, batch: MeasuredBatch
    ) -> Tail | None:
        """When the gang begins with its batch `number`; None if not known yet.

        Args:
            before: the state before the release; the gang holds its nodes.
            after: the state after it.
            key: of the gang.
            number: a release that is repeated for the same batch gets the same answer; 0 for none.
            batch: the newest one that the gang has finished.
        """
        measured = self._gangs.setdefault(key, _Measured())
        gang = before.gangs.get(key)
        if gang is None or 0 < number == measured.number:
            return measured.tail or before.tails.get(key)
        measured.number = number
        measured.batches.append(batch)
        computed = await self._tail(before, after, gang, list(measured.batches))
        measured.tail = computed or before.tails.get(key)
        if measured.tail is not None:
            self._remaining.labels(*key).set(measured.tail.remaining)
            self._num_kept.labels(*key).set(measured.tail.num_kept)
        return measured.tail

    async def _tail(
        self, before: State, after: State, gang: Gang, batches: Sequence[MeasuredBatch]
    ) -> Tail | None:
        members = before.members(gang)
        others = _generating(after, gang.run_id, {node.node_id for node in members})
        # Kept nodes do not generate, so that nothing migrates when the gang begins.
        lent = (
            [] if gang.key in after.gangs else [n for n in members if ROLLOUT in n.capability_tags]
        )
        engines = self._engines(others, len(lent), batches[-1])
        if engines is None:
            return None
        gang_costs = GangCosts(
            num_instances=len(lent),
            switch_seconds=max((n.switch_seconds.get(gang.tag, 0.0) for n in lent), default=0.0),
            token_seconds=sum(b.training_seconds for b in batches)
            / sum(b.num_tokens for b in batches),
        )
        return await asyncio.to_thread(best_tail, drawn(batches), engines, gang_costs)

    def _engines(
        self, others: Sequence[Node], num_lent: int, batch: MeasuredBatch
    ) -> Engines | None:
        """The nodes that generate until the gang begins; None: not measured, or none is left."""
        slots = [node.report.max_running for node in others if node.report is not None]
        latency = self._latencies[others[0].assigned_run].latency if others else None
        if latency is None or not any(slots):
            return None
        largest = latency.batches[-1]
        return Engines(
            num_instances=len(others) + num_lent,
            latency=latency,
            slots=min(filter(None, slots)),
            prompt_tokens=batch.prompt_tokens,
            # An upper bound: a prefill computes as many tokens at once as it likes.
            prefill_seconds=latency.seconds(largest) / largest,
        )


def _generating(state: State, run_id: str, besides: set[str]) -> list[Node]:
    return [
        node
        for node in state.nodes.values()
        if node.assignment.tag == ROLLOUT
        and node.assigned_run == run_id
        and node.node_id not in besides
    ]


def drawn(batches: Sequence[MeasuredBatch]) -> list[list[Sequence[int]]]:
    """Batches as large as the newest, whose groups are drawn from all of them; always the same."""
    random, groups = Random(0), [group for batch in batches for group in batch.groups]
    number = min(_DRAWN_ROLLOUTS // batches[-1].num_rollouts, _MOST_DRAWS)
    size = len(batches[-1].groups)
    return [random.choices(groups, k=size) for _ in range(max(number, 1))]
