"""Holds what the nodes did, and the scheduler's audit log, against what may be.

A node has two owners when two workers hold its device at once, when anything happens on it under an
older epoch than before, when its work goes on elsewhere while it, awake, still does it, or when the
store of the effects takes an effect of a gang from a former member. All pure functions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from tests.chaos.scheduler.audit import Entry, gangs_by_assignment
from tests.chaos.scheduler.ledger import Event

GRACE_SECONDS = 3.0
"""A node agent that wakes with its lease run out must have stopped all work after this."""

_Assignment = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Violations found, and how much was looked at."""

    shared_devices: int = 0
    """Times that a worker took a device which another one held."""
    older_epochs: int = 0
    """Assignments under which something happened on a node after a newer one had been seen."""
    outlived_leases: int = 0
    """Assignments of lost nodes that went on while their work was done elsewhere already."""
    stale_effects: int = 0
    """Former members of a gang whose effects were still accepted."""
    reused_epochs: int = 0
    """Epochs, or numbers of entries of the audit log, that were given out twice, and assignments
    that were granted to two gangs."""
    partial_gangs: int = 0
    """Gangs seen or granted with some of their nodes."""
    deadlocks: int = 0
    """Gangs that fit and never got their nodes, though all that did gave theirs back."""
    work_interrupted: int = 0
    """Activities that a restart of the scheduler touched."""
    effects: int = 0
    """Effects accepted."""
    work_moved: int = 0
    """Times that a gang's work was taken over by other nodes, or under other epochs."""
    gangs_served: int = 0
    """Gangs that got all of their nodes, worked and gave them back."""

    OWNERS: ClassVar[tuple[str, ...]] = (
        "shared_devices",
        "older_epochs",
        "outlived_leases",
        "stale_effects",
        "reused_epochs",
    )
    """The fields that are ways of having two owners."""

    @property
    def double_owners(self) -> int:
        """Nodes held by two owners, in any way."""
        return sum(getattr(self, name) for name in self.OWNERS)

    @property
    def violations(self) -> int:
        """All that must be 0."""
        others = self.partial_gangs + self.deadlocks + self.work_interrupted
        return self.double_owners + others

    def __add__(self, other: Verdict) -> Verdict:
        """Both together."""
        return Verdict(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A stretch of time in which a worker held its node's device for one assignment."""

    node: str
    """Node."""
    tag: str
    """Activity."""
    epoch: int | None
    """Assignment; None: the worker's contract carries none."""
    begin: float
    """Monotonic seconds."""
    end: float
    """Monotonic seconds; infinite: to the end of the history."""


def check(events: Sequence[Event], audit: Sequence[Entry]) -> Verdict:
    """Everything but what a restart of the scheduler may not do, see `interrupted`."""
    gangs = gangs_by_assignment(audit)
    takes = Counter(event.gang for event in events if event.kind == "take")
    return Verdict(
        shared_devices=_shared_devices(events),
        older_epochs=len(set(_older_epochs(events))),
        outlived_leases=len(set(_outlived(events, audit, gangs))),
        stale_effects=len(set(_stale_effects(events, gangs))),
        reused_epochs=_reused(audit) + _granted_twice(events),
        partial_gangs=sum(
            event.kind == "partial" or (event.kind == "grant" and len(event.members) != event.asked)
            for event in events
        ),
        effects=sum(event.kind == "effect" for event in events),
        work_moved=takes.total() - len(takes),
        gangs_served=sum(event.kind == "close" for event in events),
    )


def holds(events: Sequence[Event]) -> list[Hold]:
    """Who held which device when; a worker that is killed holds nothing any more."""
    found = []
    standing: dict[tuple[str, str], Event] = {}

    def end(key: tuple[str, str], time: float) -> None:
        if (begun := standing.pop(key, None)) is not None:
            found.append(_hold(begun, time))

    for event in events:
        match event.kind:
            case "hold":
                end((event.node, event.tag), event.time)
                standing[event.node, event.tag] = event
            case "let_go":
                end((event.node, event.tag), event.time)
            case "death":
                for key in [key for key in standing if key[0] == event.node]:
                    end(key, event.time)
    return found + [_hold(begun, math.inf) for begun in standing.values()]


def interrupted(events: Sequence[Event], audit: Sequence[Entry]) -> int:
    """Activities that only the scheduler's restart can have interrupted.

    Nodes that nothing else happened to are never lost, never register again, and take the device
    once for each assignment; where the worker's contract carries no epoch, once for each that names
    its activity.
    """
    born = Counter(entry.node for entry in audit if entry.kind == "registered")
    lost = sum(entry.kind == "lost" for entry in audit)
    message = Counter((e.node, e.tag) for e in audit if e.kind == "assigned")
    held = Counter((hold.node, hold.tag, hold.epoch) for hold in holds(events))
    again = sum(
        max(0, count - (message[node, tag] if epoch is None else 1))
        for (node, tag, epoch), count in held.items()
    )
    return lost + (born.total() - len(born)) + again


def reassigned(events: Sequence[Event]) -> list[float]:
    """Seconds from the death of each node that a gang worked on to the work of its successors.

    A gang that ended before has none.
    """
    found = []
    for index, death in enumerate(events):
        if death.kind == "death":
            for gang in _working(events[:index], death.node):
                found += list(_first_effect(events[index:], gang, death))
    return found


def _hold(begun: Event, end: float) -> Hold:
    return Hold(node=begun.node, tag=begun.tag, epoch=begun.epoch, begin=begun.time, end=end)


def _shared_devices(events: Sequence[Event]) -> int:
    shared = 0
    holders: dict[str, set[str]] = {}
    for event in events:
        there = holders.setdefault(event.node, set())
        match event.kind:
            case "hold":
                shared += bool(there - {event.tag})
                there.add(event.tag)
            case "let_go":
                there.discard(event.tag)
            case "death":
                there.clear()
    return shared


def _older_epochs(events: Sequence[Event]) -> Iterator[_Assignment]:
    newest: dict[str, int] = {}
    for event in events:
        if event.kind in ("hold", "let_go", "effect") and event.epoch is not None:
            if event.epoch < newest.get(event.node, 0):
                yield event.node, event.epoch
            newest[event.node] = max(event.epoch, newest.get(event.node, 0))


def _outlived(
    events: Sequence[Event], audit: Sequence[Entry], gangs: Mapping[_Assignment, str]
) -> Iterator[_Assignment]:
    """Assignments that their nodes, though awake, still did when others had begun to do them."""
    sleeps = _sleeps(events)
    for hold in holds(events):
        gang = gangs.get((hold.node, hold.epoch or 0))
        given_up = _epoch_at_loss(audit, hold)
        if gang is None or given_up is None:
            continue
        begun = _begin_of_newer(events, gang, hold, given_up)
        if hold.end > begun and not _slept(hold, begun, sleeps.get(hold.node, ())):
            yield hold.node, hold.epoch or 0


def _epoch_at_loss(audit: Sequence[Entry], hold: Hold) -> int | None:
    """Assignment under which the node of `hold` was lost, during it; None: it was not."""
    lost = [e.epoch for e in audit if e.kind == "lost" and e.node == hold.node]
    return min((epoch for epoch in lost if epoch >= (hold.epoch or 0)), default=None)


def _begin_of_newer(events: Sequence[Event], gang: str, hold: Hold, given_up: int) -> float:
    """When the first effect was accepted from those who took over after `given_up`."""
    members: Mapping[str, int] = {}
    for event in events:
        if event.kind == "take" and event.gang == gang:
            is_newer = max(event.members.values()) > given_up
            members = event.members if is_newer else {}
        elif (
            event.kind == "effect"
            and members.get(event.node) == event.epoch
            and members.get(hold.node) != hold.epoch
        ):
            return event.time
    return math.inf


def _slept(hold: Hold, begun: float, sleeps: Sequence[tuple[float, float]]) -> bool:
    """Whether its agent was frozen when others began, and stopped the work soon after it woke."""
    return any(
        hold.begin < woken and since < begun and hold.end <= woken + GRACE_SECONDS
        for since, woken in sleeps
    )


def _sleeps(events: Sequence[Event]) -> dict[str, list[tuple[float, float]]]:
    """(frozen at, woken at) of each node's agent."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.kind == "freeze":
            found.setdefault(event.node, []).append((event.time, math.inf))
        elif event.kind == "wake":
            since, _ = found[event.node].pop()
            found[event.node].append((since, event.time))
    return found


def _stale_effects(
    events: Sequence[Event], gangs: Mapping[_Assignment, str]
) -> Iterator[_Assignment]:
    members: dict[str, Mapping[str, int]] = {}
    for event in events:
        match event.kind:
            case "take":
                members[event.gang] = event.members
            case "close":
                members.pop(event.gang, None)
            case "effect" if event.epoch is not None:
                gang = gangs.get((event.node, event.epoch), "")
                if gang in members and members[gang].get(event.node) != event.epoch:
                    yield event.node, event.epoch


def _reused(audit: Sequence[Entry]) -> int:
    epochs = Counter(entry.epoch for entry in audit if entry.kind == "assigned")
    numbers = Counter(entry.sequence for entry in audit)
    return sum(count - 1 for count in (*epochs.values(), *numbers.values()))


def _granted_twice(events: Sequence[Event]) -> int:
    gangs: dict[_Assignment, set[str]] = {}
    for event in events:
        if event.kind == "grant":
            for assignment in event.members.items():
                gangs.setdefault(assignment, set()).add(event.gang)
    return sum(len(names) > 1 for names in gangs.values())


def _working(events: Sequence[Event], node: str) -> list[str]:
    """Gangs of whose newest take `node` is a member."""
    members: dict[str, Mapping[str, int]] = {}
    for event in events:
        if event.kind == "take":
            members[event.gang] = event.members
        elif event.kind == "close":
            members.pop(event.gang, None)
    return [gang for gang, who in members.items() if node in who]


def _first_effect(events: Sequence[Event], gang: str, death: Event) -> Iterator[float]:
    """Seconds from the death to the first effect of those who took the gang's work over."""
    taken = False
    for event in events:
        if event.gang != gang:
            continue
        if event.kind == "close":
            return
        taken = taken or event.kind == "take"
        if taken and event.kind == "effect":
            yield event.time - death.time
            return
