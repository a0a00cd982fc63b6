"""The roles of an iteration, their costs and their dependencies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from scheduler.model.stage_profile import StageProfile

Kind = tuple[int, ...]
"""The roles of a node: ascending indices into `Dataflow.roles`; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One part of an iteration, under the tag that its nodes carry.

    Raises:
        ValueError: a field out of range.
    """

    tag: str
    """"rollout", "train", "critic", "reference", "reward", or any other."""
    profile: StageProfile
    """Seconds of its part by number of nodes."""
    active_bytes: int = 0
    """Device memory of a node while it does this role."""
    parked_bytes: int = 0
    """Device memory of a node that carries the tag while it does another role."""
    switch_seconds: float = 0.0
    """Seconds of a node's switch from another role to this one."""
    shares_nodes: bool = True
    """Whether its nodes may carry other tags too, and do them at other times."""
    elastic: bool = False
    """Whether it continues with fewer nodes while some of its nodes do another role, as rollout
    can; otherwise all of its nodes work together from start to end, as a gang does."""
    after: tuple[str, ...] = ()
    """Roles that end before it starts. Omit a role that may be an iteration behind: then the
    makespan is the period of a pipeline, at the cost of staleness."""
    streams_from: tuple[str, ...] = ()
    """Roles whose output it processes as it arrives: it starts no earlier and ends no earlier."""

    def __post_init__(self) -> None:
        if not self.tag:
            raise ValueError("tag is '': name the role")
        for name in ("active_bytes", "parked_bytes", "switch_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} of {self.tag} is {getattr(self, name)}: it must be at least 0"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """Roles and their dependencies.

    Raises:
        ValueError: no role, a duplicate tag, an unknown tag, or a cycle.
    """

    roles: tuple[Role, ...]
    """Each tag once."""
    order: tuple[int, ...] = field(init=False)
    """Indices of the roles in topological order."""
    after: tuple[Kind, ...] = field(init=False)
    """`Role.after` of each role, as indices."""
    streams_from: tuple[Kind, ...] = field(init=False)
    """`Role.streams_from` of each role, and of those in turn, as indices."""

    def __post_init__(self) -> None:
        index = {role.tag: number for number, role in enumerate(self.roles)}
        if not self.roles or len(index) != len(self.roles):
            tags = [role.tag for role in self.roles]
            raise ValueError(f"roles have the tags {tags}: give at least one role, each tag once")
        for name in ("after", "streams_from"):
            resolved = tuple(_indices(role, name, index) for role in self.roles)
            object.__setattr__(self, name, resolved)
        object.__setattr__(self, "order", self._ordered())
        object.__setattr__(self, "streams_from", self._closed())

    def critical_path(self, seconds: Sequence[float]) -> float:
        """Seconds of an iteration whose roles take `seconds` and share no nodes."""
        begins = [0.0] * len(self.roles)
        ends = [0.0] * len(self.roles)
        for role in self.order:
            sources = self.streams_from[role]
            begins[role] = max(
                [0.0, *(ends[other] for other in self.after[role]), *(begins[s] for s in sources)]
            )
            ends[role] = max([begins[role] + seconds[role], *(ends[s] for s in sources)])
        return max(ends)

    def levels(self) -> list[Kind]:
        """Roles that may run concurrently, in order of their start."""
        depths = [0] * len(self.roles)
        for role in self.order:
            ended = [depths[other] + 1 for other in self.after[role]]
            depths[role] = max([0, *ended, *(depths[source] for source in self.streams_from[role])])
        every = range(len(self.roles))
        return [
            tuple(role for role in every if depths[role] == depth)
            for depth in range(max(depths) + 1)
        ]

    def tails(self, seconds: Sequence[float]) -> list[float]:
        """Of each role: seconds from its start to the end of the longest chain after it."""
        behind = [0.0] * len(self.roles)
        tails = list(seconds)
        for role in reversed(self.order):
            tails[role] = seconds[role] + behind[role]
            for other in self.after[role] + self.streams_from[role]:
                behind[other] = max(behind[other], tails[role])
        return tails

    def kinds(self, device_bytes: int) -> Iterator[Kind]:
        """All kinds that a node of `device_bytes` may have, the empty kind first."""
        found: list[Kind] = [()]
        for kind in found:
            yield kind
            first = kind[-1] + 1 if kind else 0
            larger = ((*kind, role) for role in range(first, len(self.roles)))
            found.extend(wider for wider in larger if self.may_carry(wider, device_bytes))

    def may_carry(self, kind: Kind, device_bytes: int) -> bool:
        """Whether a node's memory and its roles allow for all of `kind`."""
        roles = [self.roles[index] for index in kind]
        if len(roles) > 1 and not all(role.shares_nodes for role in roles):
            return False
        parked = sum(role.parked_bytes for role in roles)
        return all(role.active_bytes + parked - role.parked_bytes <= device_bytes for role in roles)

    def _ordered(self) -> tuple[int, ...]:
        waits = {
            role: self.after[role] + self.streams_from[role] for role in range(len(self.roles))
        }
        try:
            return tuple(TopologicalSorter(waits).static_order())
        except CycleError as error:
            cycle = " -> ".join(self.roles[role].tag for role in error.args[1])
            raise ValueError(f"roles wait for each other: {cycle}; remove a dependency") from None

    def _closed(self) -> tuple[Kind, ...]:
        sources = [set(direct) for direct in self.streams_from]
        for role in self.order:
            sources[role] = sources[role].union(*(sources[source] for source in sources[role]))
        return tuple(tuple(sorted(found)) for found in sources)


def _indices(role: Role, name: str, index: dict[str, int]) -> Kind:
    tags: tuple[str, ...] = getattr(role, name)
    for tag in tags:
        if tag not in index:
            raise ValueError(f"{name} of {role.tag} names {tag!r}: use one of {sorted(index)}")
    return tuple(index[tag] for tag in tags)
