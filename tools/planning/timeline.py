"""What an iteration takes when its roles are on given nodes: the cost estimate of a placement.

As in ReaL and RLHFuse (arXiv 2409.13221, plan generator) a plan is costed by playing the dataflow
through: a role begins when its inputs are there and its nodes are free, the one with the longest
chain behind it first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tools.planning.dataflow import Dataflow, Kind


class Timeline:
    """One iteration, played from change to change.

    Rules: a gang begins when every node it is on is free of other gangs, and holds them to its end;
    it takes nodes from an elastic role at once, unless it streams from it. What no gang holds does
    the elastic role with the longest chain behind it. A node that carries several tags takes
    `switch_seconds` whenever it turns to another role, also at the beginning, since the iteration
    before ended with another.

    Args:
        dataflow: the roles.
        groups: kinds of node, and how many nodes there are of each.
    """

    def __init__(self, dataflow: Dataflow, groups: Sequence[tuple[Kind, int]]) -> None:
        self._flow = dataflow
        self._groups = groups
        size = len(dataflow.roles)
        self._num_nodes = [sum(n for kind, n in groups if role in kind) for role in range(size)]
        seconds = [self._seconds(role, self._num_nodes[role]) for role in range(size)]
        tails = dataflow.tails(seconds)
        self._urgent = sorted(range(size), key=lambda role: (-tails[role], role))
        self._done = [0.0] * size
        self._acting: list[int | None] = [None] * len(groups)
        self._ready = [0.0] * len(groups)
        self._now = 0.0
        self.begins: list[float | None] = [None] * size
        """When each role began."""
        self.ends: list[float | None] = [None] * size
        """When each role ended; None: it cannot."""
        self.seconds = self._play()
        """The makespan; infinite if some role cannot end."""

    def _play(self) -> float:
        while None in self.ends:
            while self._begin_gang() or self._assign():
                pass  # what begins now lets begin what streams from it
            rates = [self._rate(role) for role in range(len(self._done))]
            if not self._advance(rates):
                return math.inf
            self._end()
        return self._now

    def _begin_gang(self) -> bool:
        """Begin the most urgent gang that can begin; whether there was one."""
        for role in self._urgent:
            groups = [group for group, (kind, _) in enumerate(self._groups) if role in kind]
            if groups and self._may_begin(role, groups):
                for group in groups:
                    self._turn(group, role)
                return True
        return False

    def _assign(self) -> bool:
        """Give the nodes that no gang holds to elastic roles; whether one of these began."""
        waiting = self.begins.count(None)
        elastic = [role for role in self._urgent if self._elastic(role) and self._open(role)]
        for group, (kind, _) in enumerate(self._groups):
            if not self._held(group):
                unfinished = (role for role in elastic if role in kind and self._done[role] < 1)
                self._turn(group, next(unfinished, None))
        return self.begins.count(None) < waiting

    def _turn(self, group: int, role: int | None) -> None:
        if role is not None and self.begins[role] is None:
            self.begins[role] = self._now
        if role is not None and role != self._acting[group]:
            shared = len(self._groups[group][0]) > 1
            switch = self._flow.roles[role].switch_seconds if shared else 0.0
            self._ready[group] = self._now + switch
        self._acting[group] = role

    def _rate(self, role: int) -> float:
        """Share of the role's work that is done in a second from now on."""
        if self._done[role] >= 1:
            return 0.0
        nodes = sum(
            count
            for (_, count), acting, ready in zip(
                self._groups, self._acting, self._ready, strict=True
            )
            if acting == role and ready <= self._now
        )
        if nodes == 0 or (nodes < self._num_nodes[role] and not self._elastic(role)):
            return 0.0
        return 1.0 / self._seconds(role, nodes)

    def _advance(self, rates: Sequence[float]) -> bool:
        """Advance to the next time at which nodes are ready or work is done, if there is one."""
        left = [
            (1.0 - done) / rate if rate else math.inf
            for done, rate in zip(self._done, rates, strict=True)
        ]
        ready = min((ready for ready in self._ready if ready > self._now), default=math.inf)
        seconds = min(ready - self._now, *left)
        if math.isinf(seconds):
            return False
        for role, rate in enumerate(rates):
            is_done = left[role] <= seconds
            self._done[role] = 1.0 if is_done else self._done[role] + rate * seconds
        self._now = min(ready, self._now + min(left))
        return True

    def _end(self) -> None:
        """End the roles whose work is done and whose sources have ended."""
        for role in self._flow.order:
            sources = self._flow.streams_from[role]
            if self._done[role] >= 1 and all(self.ends[source] is not None for source in sources):
                self.ends[role] = self._now if self.ends[role] is None else self.ends[role]

    def _may_begin(self, role: int, groups: Sequence[int]) -> bool:
        """Whether a gang's inputs are there, and its nodes, none of them its own sources'."""
        if self._elastic(role) or self.begins[role] is not None or not self._open(role):
            return False
        sources = {s for s in self._flow.streams_from[role] if self.ends[s] is None}
        return not any(
            self._held(group) or sources.intersection(self._groups[group][0]) for group in groups
        )

    def _open(self, role: int) -> bool:
        """Whether what the role waits for is there, and it has not ended."""
        ended = all(self.ends[other] is not None for other in self._flow.after[role])
        begun = all(self.begins[other] is not None for other in self._flow.streams_from[role])
        return ended and begun and self.ends[role] is None

    def _held(self, group: int) -> bool:
        """Whether a gang that has not ended has the nodes."""
        role = self._acting[group]
        return role is not None and not self._elastic(role) and self.ends[role] is None

    def _elastic(self, role: int) -> bool:
        return self._flow.roles[role].elastic

    def _seconds(self, role: int, nodes: int) -> float:
        return self._flow.roles[role].profile.seconds(nodes)
