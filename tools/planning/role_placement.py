"""Role placement: a search for the roles of each node. Colocated, disaggregated and multiplexed are
results, not modes (SeamlessFlow, arXiv 2508.11553; the search follows ReaL and RLHFuse, whose plan
generator also enumerates with pruning where possible).

Nodes are equal, so a placement is the number of nodes of each kind. If there are few placements,
all are tried, except those that a bound rules out; otherwise a steepest descent starts from common
placements. Both are deterministic.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tools.planning.dataflow import Dataflow, Kind, Role
from tools.planning.timeline import Timeline

MAX_ENUMERATED = 20_000
"""Largest number of placements that are all tried."""

_Groups = tuple[tuple[Kind, int], ...]
"""Kinds of node with roles, ascending, and the number of nodes of each."""
_Cost = tuple[float, int, int, int]
"""Seconds, nodes that roles lack, tags on all nodes, nodes used; compared in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The tags of each node, and the estimated makespan of an iteration."""

    tags: tuple[tuple[str, ...], ...]
    """Of each node; gangs' nodes first, so pair them with nodes by falling `train_priority`."""
    seconds: float
    """Estimated makespan of an iteration."""
    spans: tuple[tuple[str, float, float], ...]
    """Tag, begin and end of each role, in the order in which they begin."""


def place(
    dataflow: Dataflow,
    num_nodes: int,
    device_bytes: int,
    max_enumerated: int = MAX_ENUMERATED,
) -> Placement:
    """The placement with the least estimated makespan; of equals that with fewest tags and nodes.

    Args:
        dataflow: roles, costs and order.
        num_nodes: nodes, all alike.
        device_bytes: device memory of one.
        max_enumerated: placements up to which all are tried; beyond, the result is a local optimum.

    Raises:
        ValueError: no nodes, a role that fits on none, or no placement found.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes is {num_nodes}: give at least 1")
    for role in dataflow.roles:
        _check_fits(role, num_nodes, device_bytes)
    kinds = list(dataflow.kinds(device_bytes))
    search = _Search(dataflow, kinds, num_nodes)
    search.descend()
    if math.comb(num_nodes + len(kinds) - 1, num_nodes) <= max_enumerated:
        search.enumerate_all()
    if math.isinf(search.best_cost[0]):
        raise ValueError(f"num_nodes is {num_nodes}: found no placement of all roles, give more")
    return _placement(dataflow, search.best, num_nodes)


class _Search:
    """The best placement so far, and two ways to a better one."""

    def __init__(self, dataflow: Dataflow, kinds: Sequence[Kind], num_nodes: int) -> None:
        self._flow = dataflow
        self._kinds = kinds
        self._allowed = frozenset(kinds)
        self._num_nodes = num_nodes
        self._costs: dict[_Groups, _Cost] = {}
        self.best: _Groups = ()
        self.best_cost: _Cost = (math.inf, sys.maxsize, 0, 0)

    def descend(self) -> None:
        """Steepest descent from each seed."""
        for seed in self._seeds():
            here, cost = seed, self._cost(seed)
            while True:
                step = min(self._neighbours(here), key=lambda groups: (self._cost(groups), groups))
                if self._cost(step) >= cost:
                    break
                here, cost = step, self._cost(step)
            self._keep(here)

    def enumerate_all(self) -> None:
        """Try every placement whose bound does not rule it out."""
        self._extend((), self._num_nodes, 1)

    def _extend(self, groups: _Groups, free: int, first: int) -> None:
        """Add kinds from `first` on to `groups`, on `free` nodes. Kind 0 carries nothing."""
        if self._bound(groups, free, first) > self.best_cost[0]:
            return
        if first == len(self._kinds) or not free:
            self._keep(groups)
            return
        for count in range(free, 0, -1):
            self._extend((*groups, (self._kinds[first], count)), free - count, first + 1)
        self._extend(groups, free, first + 1)

    def _bound(self, groups: _Groups, free: int, first: int) -> float:
        """Critical path if every role had all nodes it can still get."""
        open_roles = {role for kind in self._kinds[first:] for role in kind}
        seconds = [
            role.profile.seconds(_nodes(groups, index) + (free if index in open_roles else 0))
            for index, role in enumerate(self._flow.roles)
        ]
        return _rounded(self._flow.critical_path(seconds))

    def _keep(self, groups: _Groups) -> None:
        ordered = tuple(sorted(groups))
        if (self._cost(ordered), ordered) < (self.best_cost, self.best):
            self.best, self.best_cost = ordered, self._cost(ordered)

    def _cost(self, groups: _Groups) -> _Cost:
        if groups not in self._costs:
            seconds = _rounded(Timeline(self._flow, groups).seconds)
            lacking = sum(
                max(0, role.profile.nodes[0] - _nodes(groups, index))
                for index, role in enumerate(self._flow.roles)
            )
            tags = sum(len(kind) * count for kind, count in groups)
            self._costs[groups] = (seconds, lacking, tags, sum(count for _, count in groups))
        return self._costs[groups]

    def _seeds(self) -> Iterator[_Groups]:
        """All roles everywhere; a share for each; for each of a level; each on the fewest nodes."""
        every = tuple(range(len(self._flow.roles)))
        for nodes in (
            [every] * self._num_nodes,
            self._shared([every]),
            self._shared(self._flow.levels()),
            self._fewest(),
        ):
            kinds = Counter(kind for kind in nodes if kind in self._allowed)
            yield tuple(sorted((kind, count) for kind, count in kinds.items() if kind))

    def _shared(self, levels: Sequence[Kind]) -> list[Kind]:
        """All nodes carry a role of each level; roles of a level share them by their work."""
        nodes: list[Kind] = [()] * self._num_nodes
        for level in levels:
            work = [self._flow.roles[role].profile.seconds(self._num_nodes) for role in level]
            ends = [round(self._num_nodes * end / sum(work)) for end in accumulate(work)]
            for node in range(self._num_nodes):
                nodes[node] = tuple(sorted((*nodes[node], level[bisect_right(ends, node)])))
        return nodes

    def _fewest(self) -> list[Kind]:
        """Each role on the fewest nodes that can do it, those that carry least so far."""
        nodes: list[Kind] = [()] * self._num_nodes
        for index, role in enumerate(self._flow.roles):
            wider = [tuple(sorted((*kind, index))) for kind in nodes]
            fitting = [node for node, kind in enumerate(wider) if kind in self._allowed]
            for node in sorted(fitting, key=lambda node: len(nodes[node]))[: role.profile.nodes[0]]:
                nodes[node] = wider[node]
        return nodes

    def _neighbours(self, groups: _Groups) -> Iterator[_Groups]:
        """Placements in which 1, 2, 4 … or all nodes of one kind are of another."""
        present = dict(groups)
        present[()] = self._num_nodes - sum(present.values())
        yield groups
        for kind, count in present.items():
            for other in self._turns(kind, present):
                for moved in _steps(count):
                    changed = Counter(present)
                    changed[kind] -= moved
                    changed[other] += moved
                    yield tuple(sorted((k, n) for k, n in changed.items() if k and n))

    def _turns(self, kind: Kind, present: Iterable[Kind]) -> set[Kind]:
        """What a node of `kind` may become: a role more, less or another, or what others are."""
        roles = set(range(len(self._flow.roles)))
        more = {tuple(sorted((*kind, role))) for role in roles - set(kind)}
        less = {tuple(other for other in kind if other != role) for role in kind}
        swapped = {tuple(sorted((*fewer, role))) for fewer in less for role in roles - set(kind)}
        return ((more | less | swapped | set(present)) & self._allowed) - {kind}


def _check_fits(role: Role, num_nodes: int, device_bytes: int) -> None:
    if role.active_bytes > device_bytes:
        raise ValueError(
            f"active_bytes of {role.tag} is {role.active_bytes}, a node has {device_bytes}: "
            "spread the role over more nodes or take larger ones"
        )
    if role.profile.nodes[0] > num_nodes:
        raise ValueError(
            f"num_nodes is {num_nodes}: {role.tag} was measured on {role.profile.nodes[0]} or more"
        )


def _placement(dataflow: Dataflow, groups: _Groups, num_nodes: int) -> Placement:
    timeline = Timeline(dataflow, groups)
    kinds = [kind for kind, count in groups for _ in range(count)]
    kinds.sort(key=lambda kind: (-sum(not dataflow.roles[role].elastic for role in kind), kind))
    kinds += [()] * (num_nodes - len(kinds))
    spans = [
        (role.tag, begin, end)
        for role, begin, end in zip(dataflow.roles, timeline.begins, timeline.ends, strict=True)
        if begin is not None and end is not None
    ]
    return Placement(
        tags=tuple(tuple(dataflow.roles[role].tag for role in kind) for kind in kinds),
        seconds=timeline.seconds,
        spans=tuple(sorted(spans, key=lambda span: span[1:])),
    )


def _nodes(groups: _Groups, role: int) -> int:
    return sum(count for kind, count in groups if role in kind)


def _steps(count: int) -> list[int]:
    """Powers of two up to `count`, and `count`; none for 0."""
    return [*(1 << power for power in range((count - 1).bit_length())), count] if count else []


def _rounded(seconds: float) -> float:
    """So that a last bit never decides between two placements."""
    return round(seconds, 9)
