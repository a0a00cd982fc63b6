"""Which node does what: pure functions of nodes, gangs and the clock.

A training gang preempts rollout and gets all of its nodes or none; every other node that can does
rollout (SeamlessFlow, arXiv 2508.11553, tag scheduler). Lending is optional, the return is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.records import ROLLOUT, TRAIN, Assignment, Gang, GangKey, Node, NodeState
from services.chassis import plugins

__all__ = ["POLICIES", "AllocationPolicy", "Plan", "PreemptivePolicy", "load_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every available node shall do."""

    assignments: Mapping[str, Assignment]
    """By node_id, with epoch 0: epochs are given out by whoever carries the plan out."""
    unplaced: tuple[GangKey, ...] = ()
    """Gangs that hold no node, in order of arrival."""


class AllocationPolicy(Protocol):
    """Decides who does what; asked after every change, so it must keep what is well placed."""

    def plan(self, nodes: Sequence[Node], gangs: Sequence[Gang], now: float) -> Plan:
        """Assign every available node; `now` is in seconds since 1970.

        A gang is either named by exactly `num_nodes` assignments or is in `unplaced`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptivePolicy:
    """Gangs in order of arrival, rollout everywhere else.

    A gang that waits reserves the nodes it could use, so later ones cannot starve it; it holds none
    of them, so they roll out meanwhile. A gang larger than all its nodes together reserves nothing.
    """

    lend: bool = True
    """Nodes that can train do rollout while no gang wants them."""
    min_dwell_seconds: float = 0.0
    """A node that a gang gave back is not lent before this has passed."""

    def plan(self, nodes: Sequence[Node], gangs: Sequence[Gang], now: float) -> Plan:
        """See `AllocationPolicy.plan`."""
        pool = {node.node_id: node for node in nodes if node.available}
        members = _place(pool, sorted(gangs, key=lambda gang: gang.arrival), now)
        held = {
            node.node_id: assignment
            for gang, team in members
            for node, assignment in zip(team, _ranks(gang, len(team)), strict=True)
        }
        idle = {name: self._background(node, now) for name, node in pool.items()}
        placed = {gang.key for gang, _ in members}
        unplaced = tuple(gang.key for gang in gangs if gang.key not in placed)
        return Plan(assignments=idle | held, unplaced=unplaced)

    def _background(self, node: Node, now: float) -> Assignment:
        lent = TRAIN in node.capability_tags
        if ROLLOUT not in node.capability_tags:
            return Assignment()
        if lent and not (self.lend and self._rested(node, now)):
            return Assignment()
        return Assignment(tag=ROLLOUT, lent=lent)

    def _rested(self, node: Node, now: float) -> bool:
        if node.assignment.tag == ROLLOUT or node.released_time is None:
            return True
        # A clock that was set back must not keep the node idle: a negative rest counts as over.
        return not 0 <= now - node.released_time < self.min_dwell_seconds


POLICIES = {"preemptive": f"{__name__}:PreemptivePolicy"}
"""Built-in policies by name."""


def load_policy(name: str, *, lend: bool, min_dwell_seconds: float) -> AllocationPolicy:
    """The built-in policy `name`, or the plug-in "package.module:Class", with the given settings.

    Raises:
        ConfigError: neither a built-in nor a loadable plug-in, or a setting it refuses.
    """
    policy: AllocationPolicy = plugins.make(
        "policy", name, POLICIES, lend=lend, min_dwell_seconds=min_dwell_seconds
    )
    return policy


def _place(
    pool: Mapping[str, Node], gangs: Sequence[Gang], now: float
) -> list[tuple[Gang, list[Node]]]:
    """The gangs that get their nodes, with them; whole gangs first, then by arrival."""
    free = dict(pool)
    members = []
    waiting = []
    for gang in gangs:
        team = [node for node in pool.values() if _holds(gang, node)]
        if len(team) == gang.num_nodes:
            members.append((gang, _take(free, team)))
        elif gang.needed_time is None or gang.needed_time <= now:
            waiting.append(gang)
    for gang in waiting:
        candidates = [node for node in free.values() if _fits(gang, node)]
        if len(candidates) >= gang.num_nodes:
            best = sorted(candidates, key=lambda node: _preference(gang, node))
            members.append((gang, _take(free, best[: gang.num_nodes])))
        elif sum(_fits(gang, node) for node in pool.values()) >= gang.num_nodes:
            _take(free, candidates)
    return members


def _take(free: dict[str, Node], team: Iterable[Node]) -> list[Node]:
    """Remove `team` from `free`; gives it in rank order, the same for the same nodes."""
    ordered = sorted(team, key=lambda node: (-node.train_priority, node.node_id))
    for node in ordered:
        del free[node.node_id]
    return ordered


def _holds(gang: Gang, node: Node) -> bool:
    return _fits(gang, node) and node.assignment.gang_id == gang.gang_id


def _fits(gang: Gang, node: Node) -> bool:
    return node.run_id == gang.run_id and gang.tag in node.capability_tags


def _preference(gang: Gang, node: Node) -> tuple[bool, bool, float, str]:
    """Smaller is better: its own nodes, idle ones, those suited best, then by name."""
    idle = node.state is NodeState.IDLE and not node.assignment.tag
    return not _holds(gang, node), not idle, -node.train_priority, node.node_id


def _ranks(gang: Gang, size: int) -> list[Assignment]:
    return [
        Assignment(tag=gang.tag, gang_id=gang.gang_id, rank_offset=rank, world_size=size)
        for rank in range(size)
    ]
