"""Fair share: divide the nodes outside of gangs between runs. A pure, stable function."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from scheduler.model.records import ROLLOUT, Node, RunPolicy

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
