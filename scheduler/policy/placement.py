"""Placement of gangs, all nodes or none: pure, and linear in nodes for each waiting gang."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from scheduler.model.records import TRAIN, Gang, GangKey, Node, NodeState, RunPolicy

_DEFAULT = RunPolicy()
_Preference = tuple[bool, bool, bool, float, int, str]


class Placement:
    """The nodes of each gang, filled by `place`.

    Args:
        nodes: available nodes.
        gangs: all gangs.
        runs: policies by run_id.
    """

    def __init__(
        self, nodes: Iterable[Node], gangs: Iterable[Gang], runs: Mapping[str, RunPolicy]
    ) -> None:
        self._runs = runs
        self._parked = frozenset(gang.key for gang in gangs if gang.parked)
        self._able: dict[tuple[str, str], list[Node]] = defaultdict(list)
        self._holding: dict[GangKey, list[Node]] = defaultdict(list)
        for node in nodes:
            for tag in node.capability_tags:
                for run_id in node.runs_for(tag):
                    self._able[run_id, tag].append(node)
            if node.gang_key is not None:
                self._holding[node.gang_key].append(node)
        self._taken: set[str] = set()
        self._reserved: set[str] = set()
        self._blocked: set[str] = set()
        self.members: dict[GangKey, list[Node]] = {}
        """Nodes of each gang that was placed, in rank order."""
        self.waiting: dict[GangKey, str] = {}
        """Why each other gang waits, in the order in which they will be placed."""
        self.used: Counter[str] = Counter()
        """Number of nodes of gangs, by run."""

    def keep(self, gang: Gang) -> bool:
        """Let a gang keep its nodes, if it has all of them still; whether it does."""
        members = [
            node
            for node in self._holding[gang.key]
            if gang.run_id in node.runs_for(gang.tag) and gang.can_use(node.node_id)
        ]
        whole = len(members) == gang.num_nodes and not any(self.is_taken(node) for node in members)
        if not whole or self._exceeds_quota(gang):
            return False
        self._take(gang, members)
        return True

    def drop(self, gang: Gang) -> None:
        """Take back the nodes of a gang that `keep` left it."""
        self._taken.difference_update(node.node_id for node in self.members.pop(gang.key))
        self.used[gang.run_id] -= gang.num_nodes

    def place(self, gang: Gang) -> str:
        """Place a gang on the nodes that suit it best; the reason if that is not possible, or "".

        A gang that waits for nodes of other gangs reserves the free nodes it could use, and one
        that waits for its run's quota reserves the rest of the quota: later gangs cannot starve it.
        Reserved nodes do rollout. A gang that can never be placed reserves nothing.
        """
        able = [n for n in self._able[gang.run_id, gang.tag] if gang.can_use(n.node_id)]
        limit = self._limit(gang)
        if limit and gang.num_nodes > limit:
            return f"quota: run {gang.run_id} may have {limit} nodes, requested {gang.num_nodes}"
        if len(able) < gang.num_nodes:
            of = f" of {', '.join(gang.node_ids)}, where its ranks run," if gang.node_ids else ""
            nodes = f"{len(able)}{of} can do {gang.tag} for run {gang.run_id}"
            return f"nodes: {nodes}, requested {gang.num_nodes}"
        if self._exceeds_quota(gang) or gang.run_id in self._blocked:
            self._blocked.add(gang.run_id)
            return f"quota: run {gang.run_id} may have {limit} nodes"
        free = [node for node in able if not (self.is_taken(node) or self._is_reserved(node))]
        if len(free) < gang.num_nodes:
            self._reserved.update(node.node_id for node in free)
            return "nodes: other gangs hold or wait for them"
        self._take(gang, heapq.nsmallest(gang.num_nodes, free, key=self._preference(gang)))
        return ""

    def _preference(self, gang: Gang) -> Callable[[Node], _Preference]:
        """Smaller is better: the gang's present nodes, nodes without a working gang, idle nodes,
        `train_priority`, the fewest turns to interrupt (the busiest nodes continue: RLHFuse), then
        by id."""

        def key(node: Node) -> _Preference:
            held = node.gang_key
            parked = held in self._parked
            idle = parked or (node.state is NodeState.IDLE and not node.assignment.tag)
            return (
                held != gang.key,
                held not in (None, gang.key) and not parked,
                not idle,
                -node.train_priority,
                node.num_turns,
                node.node_id,
            )

        return key

    def _take(self, gang: Gang, members: list[Node]) -> None:
        """Take nodes for a gang, in rank order: the same nodes always get the same ranks."""
        self.members[gang.key] = sorted(
            members, key=lambda node: (-node.train_priority, node.node_id)
        )
        self._taken.update(node.node_id for node in members)
        self.used[gang.run_id] += gang.num_nodes

    def _limit(self, gang: Gang) -> int:
        return self._runs.get(gang.run_id, _DEFAULT).max_nodes

    def _exceeds_quota(self, gang: Gang) -> bool:
        limit = self._limit(gang)
        return bool(limit) and self.used[gang.run_id] + gang.num_nodes > limit

    def is_taken(self, node: Node) -> bool:
        return node.node_id in self._taken

    def _is_reserved(self, node: Node) -> bool:
        return node.node_id in self._reserved


def place(
    nodes: Iterable[Node], gangs: Sequence[Gang], runs: Mapping[str, RunPolicy], now: float
) -> Placement:
    """Place gangs by priority; within one priority, placed gangs stay, then others by arrival.

    Within the priority of their run, gangs that train come before others: what they train on is
    computed already. Parked gangs are not placed: they may `keep` nodes that no other gang got.
    """

    def priority(gang: Gang) -> tuple[int, bool]:
        return -runs.get(gang.run_id, _DEFAULT).priority, gang.tag != TRAIN

    placement = Placement(nodes, gangs, runs)
    asking = [gang for gang in gangs if not gang.parked]
    in_order = sorted(asking, key=lambda gang: (priority(gang), gang.arrival))
    for _, equals in groupby(in_order, key=priority):
        for gang in [gang for gang in equals if not placement.keep(gang)]:
            later = gang.needed_time is not None and gang.needed_time > now
            reason = "time: not needed yet" if later else placement.place(gang)
            if reason:
                placement.waiting[gang.key] = reason
    return placement


DECODE_INTENSITY = 8.0
"""FLOPs for each byte read while decoding long answers: the query heads that share a KV head."""
TRAIN_INTENSITY = 2048.0
"""FLOPs for each byte read while training: the tokens of a micro-batch that share a weight."""


def attained_flops(intensity: float, memory_bytes_per_second: float, flops: float) -> float:
    """FLOPs a second that a device attains: min(peak, intensity * bandwidth), the roofline.

    Args:
        intensity: FLOPs for each byte read.
        memory_bytes_per_second: of device memory.
        flops: peak of the device.
    """
    return min(flops, intensity * memory_bytes_per_second)


def train_priority(memory_bytes_per_second: float, flops: float) -> float:
    """How many times faster the node does an operation of training than one of decoding.

    Decoding is bound by bandwidth, training by FLOPs. Both are fastest if each node does what it is
    relatively better at, so the nodes with the highest ratio train. It is between 1 and
    TRAIN_INTENSITY / DECODE_INTENSITY.

    Example: H800 (3.35e12 B/s, 989e12 FLOP/s) 36.9; H20 (4.0e12, 148e12) 4.6.

    Args:
        memory_bytes_per_second: of the node's device memory; 0: unknown.
        flops: peak of the node in the training dtype; 0: unknown.

    Returns:
        The priority; 0 if either is unknown.
    """
    if not (memory_bytes_per_second > 0 and flops > 0):
        return 0.0
    training = attained_flops(TRAIN_INTENSITY, memory_bytes_per_second, flops)
    return training / attained_flops(DECODE_INTENSITY, memory_bytes_per_second, flops)
