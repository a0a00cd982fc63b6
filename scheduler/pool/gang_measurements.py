"""What is measured of gangs and their batches, and what is decided by it.

Of each cycle of a batch: whether its nodes are lent; of batches: which stage is the slower one, and
how many nodes the gang should train on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from scheduler.model.lending_state import (
    BatchForecast,
    LendingDecision,
    LendingState,
)
from scheduler.model.records import ROLLOUT, EventKind, Gang, GangKey, Node, State
from scheduler.model.stage_balance import NodeCounts, StageBalance
from scheduler.policy import split_advice, training_nodes
from scheduler.policy.allocation_policy import AllocationPolicy
from scheduler.policy.lending import LendingInputs, round_trip_seconds
from scheduler.policy.training_nodes import SplitRule

_KEPT = 1024
"""Newest rates of a node."""
_FULL = 0.9
"""Quantile of the rates above zero that counts as a node's full rate: single ones are noisy."""
_BATCHES = 4
"""The full rate is that of as long a time as the newest such periods: longer rollouts lower it."""

_Rates = deque[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What decides how many nodes the gangs that can change their size should have."""

    rule: SplitRule
    load: Callable[[Iterable[str], float, float], float]
    """`GenerationLoad.share`."""


class GangMeasurements:
    """The measurements of a transaction, which changes them with each request and release.

    Args:
        state: the committed state.
        policy: decides about lending.
        now: seconds since 1970.
        allocation: None: gangs keep their number of nodes.
        nodes: gives the transaction's.
        log: writes an entry of the audit log: its kind, cause and run.
    """

    def __init__(
        self,
        state: State,
        policy: AllocationPolicy,
        now: float,
        allocation: Allocation | None,
        *,
        nodes: Callable[[], Iterable[Node]],
        log: Callable[[EventKind, str, str], None],
    ) -> None:
        self.lendings: dict[GangKey, LendingState] = dict(state.lendings)
        self.balances: dict[GangKey, StageBalance] = dict(state.balances)
        self._policy, self._now, self._allocation = policy, now, allocation
        self._nodes, self._log = nodes, log

    def request(self, gang: Gang, standing: Gang | None) -> None:
        """Measure a request: it is for a new batch, unless it repeats an open one."""
        key, is_full = gang.key, gang.needed_time is None
        is_new = standing is None or standing.parked or gang.batch not in (0, standing.batch)
        if (lending := self.lendings.get(key)) is not None:
            lending = lending.request_batch(gang.batch) if is_new else lending
            self.lendings[key] = lending.batch_full(self._now) if is_full else lending
        if is_new:
            self._batch_done(gang, gang.done_tokens, is_lent=False)
        if is_full:
            self.balances[key] = self.balances.get(key, StageBalance()).full(self._now)

    def lend_or_keep(self, gang: Gang, forecast: BatchForecast, batch: int) -> LendingDecision:
        """Measure the cycle that ends, and decide the next one, until `batch`."""
        key = gang.key
        lending = self.lendings.get(key, LendingState())
        if lending.is_decided(batch):
            self.balances[key] = self.balances.get(key, StageBalance()).waits()
            lend = lending.lends or not self._members(gang)
            cause = f"{'lent' if lend else 'kept'}: decided before for batch {batch}"
            return LendingDecision(lend=lend, cause=cause)
        lending = lending.end_cycle(self._now, forecast.done)
        decision = self._decide_lending(gang, lending, forecast)
        self.lendings[key] = lending.start_cycle(decision, forecast, self._now, batch)
        self._batch_done(gang, forecast.done_tokens, is_lent=decision.lend)
        return decision

    def _decide_lending(
        self, gang: Gang, lending: LendingState, forecast: BatchForecast
    ) -> LendingDecision:
        """The policy's decision, if the gang has nodes that can be lent."""
        lendable = self._lendable(gang)
        if not self._members(gang):
            cause = "it has no nodes"
            return LendingDecision(lend=True, cause=cause, measured=False)
        if not lendable:
            cause = "kept: its nodes cannot do rollout"
            return LendingDecision(lend=False, cause=cause, measured=False)
        inputs = LendingInputs(
            forecast=forecast,
            num_dedicated=len(self._generating(gang.run_id)),
            num_lent=len(lendable),
            round_trip_seconds=round_trip_seconds(lendable, gang.tag),
        )
        return self._policy.decide_lending(lending, inputs)

    def end(self, key: GangKey, batch: int) -> None:
        """Discard the cycle; without a `batch` that the gang continues with, all measurements."""
        lending, balance = self.lendings.pop(key, None), self.balances.pop(key, None)
        if batch and lending is not None:
            self.lendings[key] = lending.abandon_cycle()
        if batch and balance is not None:
            self.balances[key] = balance.waits()

    def _batch_done(self, gang: Gang, tokens: int, *, is_lent: bool) -> None:
        """Measure that the gang finished its batch, if it had one; log a change of the advice."""
        node_counts = NodeCounts(
            generating=len(self._generating(gang.run_id)),
            training=gang.num_nodes,
            lent=len(self._lendable(gang)) if is_lent else 0,
        )
        before = self.balances.get(gang.key, StageBalance())
        load = self._load(gang.run_id, before)
        after = split_advice.finished(before, node_counts, self._now, load=load, tokens=tokens)
        if after.advice != before.advice:
            self._log(EventKind.ADVICE, f"gang {gang.gang_id}: {after.cause}", gang.run_id)
        self.balances[gang.key] = self._with_split(gang, after)

    def _with_split(self, gang: Gang, balance: StageBalance) -> StageBalance:
        """The balance with the advised number of nodes, if the gang can change it."""
        if self._allocation is None or not gang.unit_nodes:
            return balance
        after = training_nodes.advised(balance, gang, self._allocation.rule)
        if not self._may_have(gang, after.advised_nodes):
            return replace(after, advised_nodes=balance.advised_nodes)
        if after.advised_nodes not in (balance.advised_nodes, gang.num_nodes):
            cause = training_nodes.cause(after, gang)
            self._log(EventKind.SPLIT, cause, gang.run_id)
        return after

    def _may_have(self, gang: Gang, num_nodes: int) -> bool:
        """Whether there are as many nodes for a gang; and if fewer, whether the others roll out."""
        able = [
            node
            for node in self._nodes()
            if node.available and gang.run_id in node.runs_for(gang.tag)
        ]
        leaving = gang.num_nodes - num_nodes
        return num_nodes <= len(able) and leaving <= len(self._lendable(gang))

    def _load(self, run_id: str, balance: StageBalance) -> float:
        """Of the nodes that do rollout for the run, since the gang finished the batch before."""
        if self._allocation is None or balance.done_time is None:
            return 1.0
        names = [node.node_id for node in self._generating(run_id)]
        return self._allocation.load(names, balance.done_time, self._now)

    def _generating(self, run_id: str) -> list[Node]:
        return [
            node
            for node in self._nodes()
            if node.assignment.tag == ROLLOUT and node.assigned_run == run_id
        ]

    def _lendable(self, gang: Gang) -> list[Node]:
        return [node for node in self._members(gang) if ROLLOUT in node.capability_tags]

    def _members(self, gang: Gang) -> list[Node]:
        return [node for node in self._nodes() if node.gang_key == gang.key]


class GenerationLoad:
    """How much of what its nodes can sample a run samples, from the rates that they report.

    Training that is slower than generation throttles it: the bound on staleness lets no new rollout
    begin. Then T_gen, had it not waited, is the time of a batch times this share. Kept in memory:
    after a restart generation counts as fully loaded until rates have come.
    """

    def __init__(self) -> None:
        self._rates: dict[str, _Rates] = defaultdict(lambda: deque(maxlen=_KEPT))

    def observe(self, node: Node, now: float) -> None:
        """A node has reported, at `now`, seconds since 1970."""
        if node.report is not None and node.assignment.tag == ROLLOUT and node.taken_up:
            self._rates[node.node_id].append((now, node.report.tokens_per_second))

    def share(self, node_ids: Iterable[str], since: float, until: float) -> float:
        """Sampled tokens of these nodes between two times, in those at their full rates.

        1 if not known.
        """
        sampled = full = 0.0
        for node_id in node_ids:
            rates = self._rates.get(node_id, ())
            within = [rate for time, rate in rates if since <= time <= until]
            recent = until - _BATCHES * (until - since)
            above = sorted(rate for time, rate in rates if rate > 0 and time >= recent)
            if within and above:
                sampled += fmean(within)
                full += above[int(_FULL * (len(above) - 1))]
        return min(sampled / full, 1.0) if full else 1.0
