"""Allocation policies: the assignment of every node, as pure functions of nodes, gangs and time.

A gang preempts rollout and gets all of its nodes or none; every other capable node does rollout
(SeamlessFlow, arXiv 2508.11553, tag scheduler). Lending is optional, returning is not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

from scheduler.model.lending_state import LendingDecision, LendingState
from scheduler.model.records import ROLLOUT, Assignment, Gang, GangKey, Node, RunPolicy
from scheduler.policy import lending as gate
from scheduler.policy.lending import LendingInputs
from scheduler.policy.placement import Placement, place
from services.chassis import plugins

_DEFAULT = RunPolicy()


def divide(
    nodes: Iterable[Node], used: Mapping[str, int], runs: Mapping[str, RunPolicy]
) -> dict[str, str]:
    """The run for which each node does rollout, by node_id; nodes beyond all quotas are left out.

    A node stays with its run unless the division between two of its runs is off by one node or
    more.

    Args:
        nodes: to divide.
        used: nodes of each run's gangs, which count against its quota.
        runs: policies by run_id.
    """
    division = _Division(used, runs)
    newcomers: list[Node] = []
    # The busiest stay first: if a quota was lowered, the others leave.
    for node in sorted(nodes, key=lambda node: (-node.num_turns, node.node_id)):
        run_id = node.assigned_run
        stays = node.assignment.tag == ROLLOUT and run_id in node.runs_for(ROLLOUT)
        if stays and division.has_room(run_id):
            division.put(node, run_id)
        else:
            newcomers.append(node)
    # Nodes that serve few runs first; a move may make room for a node left over.
    newcomers.sort(key=lambda node: len(node.runs_for(ROLLOUT)))
    placed = True
    while placed:
        left = [node for node in newcomers if not division.add(node)]
        placed, newcomers = len(left) < len(newcomers), left
        division.balance()
    return division.run_of


class _Division:
    def __init__(self, used: Mapping[str, int], runs: Mapping[str, RunPolicy]) -> None:
        self._used, self._runs = used, runs
        self._counts: Counter[str] = Counter()
        self._shared: dict[tuple[str, str], list[Node]] = defaultdict(list)
        self.run_of: dict[str, str] = {}

    def has_room(self, run_id: str) -> bool:
        limit = self._runs.get(run_id, _DEFAULT).max_nodes
        return not limit or self._used.get(run_id, 0) + self._counts[run_id] < limit

    def put(self, node: Node, run_id: str) -> None:
        self.run_of[node.node_id] = run_id
        self._counts[run_id] += 1
        for other in node.runs_for(ROLLOUT):
            if other != run_id:
                self._shared[run_id, other].append(node)

    def add(self, node: Node) -> bool:
        """Add a node to the run furthest below its share (Sainte-Lague method)."""
        open_to = [run_id for run_id in node.runs_for(ROLLOUT) if self.has_room(run_id)]
        if not open_to:
            return False
        ranked = [((self._counts[run] + 0.5) / self._share(run), run) for run in open_to]
        self.put(node, min(ranked)[1])
        return True

    def balance(self) -> None:
        """Move nodes between pairs of runs while a pair is off by one or more.

        Each move brings its pair nearer to its shares, so it ends.
        """
        if not self._shared:
            return
        spare = {pair: _least_busy(nodes) for pair, nodes in self._shared.items()}
        moved = True
        while moved:
            moved = any(self._move(pair, spare[pair]) for pair in sorted(spare))

    def _move(self, pair: tuple[str, str], spare: Iterator[Node]) -> bool:
        """Move one node from the first run of a pair to the second, if it is over its share."""
        source, target = pair
        both = self._counts[source] + self._counts[target]
        due = both * self._share(source) / (self._share(source) + self._share(target))
        if self._counts[source] - due < 1 or not self.has_room(target):
            return False
        for node in spare:
            if self.run_of[node.node_id] == source:
                self.run_of[node.node_id] = target
                self._counts[source] -= 1
                self._counts[target] += 1
                return True
        return False

    def _share(self, run_id: str) -> float:
        return self._runs.get(run_id, _DEFAULT).rollout_share


def _least_busy(nodes: Iterable[Node]) -> Iterator[Node]:
    return iter(sorted(nodes, key=lambda node: (node.num_turns, node.node_id)))


LendingMode = Literal["gated", "always", "never"]
_UNASSIGNED = Assignment()
_NO_RUNS: Mapping[str, RunPolicy] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    assignments: Mapping[str, Assignment]
    """By node_id, with epoch 0: the transaction assigns epochs."""
    waiting: Mapping[GangKey, str] = field(default_factory=dict)
    """Why each waiting gang waits, in the order in which they will be placed."""

    @property
    def unplaced(self) -> tuple[GangKey, ...]:
        return tuple(self.waiting)

    def reformed(self, nodes: Iterable[Node], renewed: set[str]) -> set[GangKey | None]:
        """The gangs whose members changed or registered again (`renewed`, by node_id)."""
        before: dict[GangKey | None, set[str]] = defaultdict(set)
        after: dict[GangKey | None, set[str]] = defaultdict(set)
        for node in nodes:
            before[node.gang_key].add(node.node_id)
            planned = self.assignments.get(node.node_id, _UNASSIGNED)
            after[node.gang_under(planned)].add(node.node_id)
        return {
            key
            for key, members in after.items()
            if key is not None and (members != before[key] or members & renewed)
        }


class AllocationPolicy(Protocol):
    """Decides assignments; called after every change, so it must keep good assignments."""

    def plan(
        self,
        nodes: Sequence[Node],
        gangs: Sequence[Gang],
        now: float,
        runs: Mapping[str, RunPolicy] = ...,
    ) -> Plan:
        """Assign every available node; `now` is in seconds since 1970.

        A gang has exactly `num_nodes` assignments, or is in `waiting`, or was parked.
        """
        ...

    def decide_lending(self, lending: LendingState, inputs: LendingInputs) -> LendingDecision:
        """Whether to lend the nodes that a gang releases; if not, the gang is `parked`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptivePolicy:
    """Gangs by priority and arrival (`placement.py`), then rollout (`divide`)."""

    lending: LendingMode = "gated"
    """Whether nodes of gangs do rollout while the gang is idle: when it pays, as dynamic adjustment
    advises, always, or never."""
    min_dwell_seconds: float = 0.0
    """A node that a gang released is not lent before this time has passed."""
    moves_nodes: bool = False
    """Whether nodes that gangs can request do rollout for as long as none holds them, even if those
    of gangs that wait are never lent: gangs change their number of nodes."""

    def __post_init__(self) -> None:
        if self.lending not in get_args(LendingMode):
            modes = ", ".join(get_args(LendingMode))
            raise ValueError(f"lending is {self.lending!r}: give one of {modes}")

    def plan(
        self,
        nodes: Sequence[Node],
        gangs: Sequence[Gang],
        now: float,
        runs: Mapping[str, RunPolicy] = _NO_RUNS,
    ) -> Plan:
        """Place gangs, then divide the other nodes between runs for rollout."""
        pool = {node.node_id: node for node in nodes if node.available}
        placement = place(pool.values(), gangs, runs, now)
        shares = self._shares(pool.values(), placement, gangs, runs, now)
        assignments = dict.fromkeys(pool, _UNASSIGNED)
        for gang in gangs:
            for rank, node in enumerate(placement.members.get(gang.key, ())):
                assignments[node.node_id] = _membership(gang, node, rank)
        for name, run_id in shares.items():
            assignments[name] = _rollout(pool[name], run_id)
        return Plan(assignments=assignments, waiting=placement.waiting)

    def decide_lending(self, lending: LendingState, inputs: LendingInputs) -> LendingDecision:
        """Decide by `lending`; if gated, from measurements."""
        if self.lending == "gated":
            return gate.decide_lending(lending, inputs)
        cause = f"lending is {self.lending!r}"
        return LendingDecision(lend=self.lending == "always", cause=cause)

    def _shares(
        self,
        nodes: Collection[Node],
        placement: Placement,
        gangs: Sequence[Gang],
        runs: Mapping[str, RunPolicy],
        now: float,
    ) -> dict[str, str]:
        """The run for which each node outside of gangs does rollout, by node_id.

        Parked gangs keep their nodes, unless no other node generates for their run: the batch such
        a gang waits for would never become full.
        """
        kept = [gang for gang in gangs if gang.parked and placement.keep(gang)]
        while True:
            able = [node for node in nodes if not placement.is_taken(node)]
            able = [node for node in able if self._may_roll_out(node, now)]
            shares = _divide(able, placement, gangs, runs)
            served = set(shares.values())
            starved = [gang for gang in kept if gang.run_id not in served]
            if not starved:
                return shares
            for gang in starved:
                placement.drop(gang)
                kept.remove(gang)

    def _may_roll_out(self, node: Node, now: float) -> bool:
        if ROLLOUT not in node.capability_tags:
            return False
        if not _is_lendable(node):
            return True
        return (self.moves_nodes or self.lending != "never") and self._rested(node, now)

    def _rested(self, node: Node, now: float) -> bool:
        if node.assignment.tag == ROLLOUT or node.released_time is None:
            return True
        # If the clock was set back, the elapsed time is negative and counts as over.
        return not 0 <= now - node.released_time < self.min_dwell_seconds


POLICIES = {"preemptive": f"{__name__}:PreemptivePolicy"}


def load_policy(
    name: str, *, lending: LendingMode, min_dwell_seconds: float, moves_nodes: bool = False
) -> AllocationPolicy:
    """The built-in policy `name`, or the plug-in "package.module:Class", with the given settings.

    A plug-in is told of `moves_nodes` only if nodes move.

    Raises:
        ConfigError: it does not exist, or rejects a setting.
    """
    given = {"lending": lending, "min_dwell_seconds": min_dwell_seconds}
    given |= {"moves_nodes": True} if moves_nodes else {}
    policy: AllocationPolicy = plugins.make("policy", name, POLICIES, **given)
    return policy


def _divide(
    nodes: Sequence[Node],
    placement: Placement,
    gangs: Iterable[Gang],
    runs: Mapping[str, RunPolicy],
) -> dict[str, str]:
    """The run for which each node does rollout, by node_id.

    Where a gang leaves a tail (RLHFuse), its run keeps the m nodes with the most turns, and the
    others generate for other runs, if these can use them.
    """
    tails = {g.run_id: g.tail_nodes for g in gangs if g.tail_nodes and g.key in placement.members}
    limited = {run: _at_most(runs.get(run), placement.used[run] + m) for run, m in tails.items()}
    shares = divide(nodes, placement.used, {**runs, **limited})
    if tails:
        left = [node for node in nodes if node.node_id not in shares]
        shares |= divide(left, placement.used + Counter(shares.values()), runs)
    return shares


def _at_most(policy: RunPolicy | None, num_nodes: int) -> RunPolicy:
    known = policy or RunPolicy()
    return replace(known, max_nodes=min(known.max_nodes or num_nodes, num_nodes))


def _is_lendable(node: Node) -> bool:
    """Whether a gang could request it."""
    return len(node.capability_tags) > 1


def _membership(gang: Gang, node: Node, rank: int) -> Assignment:
    return Assignment(
        tag=gang.tag,
        gang_id=gang.gang_id,
        rank_offset=rank,
        world_size=gang.num_nodes,
        run_id=_other_than_own(node, gang.run_id),
    )


def _rollout(node: Node, run_id: str) -> Assignment:
    return Assignment(tag=ROLLOUT, lent=_is_lendable(node), run_id=_other_than_own(node, run_id))


def _other_than_own(node: Node, run_id: str) -> str:
    """The run of an assignment: empty for the node's own run."""
    return "" if run_id == node.run_id else run_id
