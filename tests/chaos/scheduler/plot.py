"""A timeline of the scenarios: assignments and faults of each node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.scheduler.checker import Hold, holds
from tests.chaos.scheduler.ledger import Event

_SECONDS = 60.0
_ROLLOUT = "#c9dcf0"
_NO_GANG = "#888888"
# One for each driver of gangs.
_GANGS = ("#3fae6a", "#b07be0", "#f2a54e")
_STOPS = {
    "freeze": ("wake", "frozen agent"),
    "cut": ("heal", "cut off"),
    "death": ("start", "dead"),
}
_HATCHES = {"freeze": "////", "cut": "....", "death": "xxxx"}


def draw_timelines(file: Path, histories: Mapping[str, Sequence[Event]]) -> None:
    """The first minute of each scenario, one row per node."""
    from matplotlib.figure import Figure  # the object interface needs no display

    figure = Figure(figsize=(13, 2.4 * len(histories)), layout="constrained")
    all_axes = figure.subplots(len(histories), 1, squeeze=False)[:, 0]
    for axes, (name, events) in zip(all_axes, histories.items(), strict=True):
        _draw(axes, name, events)
    all_axes[-1].set_xlabel(
        "seconds. pale: rollout; green, violet, orange: gangs; red line: scheduler killed, or "
        "replaced, or cut off; ////: agent frozen; ....: node cut off; xxxx: dead"
    )
    figure.savefig(file, dpi=110)


def _draw(axes: Any, title: str, events: Sequence[Event]) -> None:
    begin = next(event.time for event in events if event.kind != "hold")
    end = min(begin + _SECONDS, events[-1].time)
    rows = {name: row for row, name in enumerate(sorted({e.node for e in events if e.node}))}
    gangs = _gangs(events)
    for hold in holds(events):
        colour = _colour(hold, gangs)
        axes.barh(rows[hold.node], **_stretch(hold.begin, hold.end, begin, end), color=colour)
    for kind, node, since, until in _stops(events):
        place = _stretch(since, until, begin, end)
        hatch = _HATCHES[kind]
        axes.barh(rows[node], **place, color="none", edgecolor="#d64545", hatch=hatch, linewidth=0)
    for event in events:
        if event.kind == "kill" or (event.kind == "cut" and not event.node):
            axes.axvline(event.time - begin, color="#d64545", linewidth=0.9)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set(title=title, xlim=(0, end - begin))


def _stretch(since: float, until: float, begin: float, end: float) -> dict[str, float]:
    since, until = max(since, begin), min(until, end)
    return {"left": since - begin, "width": max(0.0, until - since), "height": 0.8}


def _gangs(events: Sequence[Event]) -> dict[tuple[str, int], str]:
    """(node, epoch) -> gang, of those whose work was taken over."""
    return {
        member: event.gang
        for event in events
        if event.kind == "take"
        for member in event.members.items()
    }


def _colour(hold: Hold, gangs: Mapping[tuple[str, int], str]) -> str:
    if hold.tag == "rollout":
        return _ROLLOUT
    gang = gangs.get((hold.node, hold.epoch or 0))
    return _NO_GANG if gang is None else _GANGS[int(gang.split("-")[1]) % len(_GANGS)]


def _stops(events: Sequence[Event]) -> list[tuple[str, str, float, float]]:
    """(kind, node, since, until) of all that was done to nodes."""
    found = []
    for index, event in enumerate(events):
        if event.kind in _STOPS and event.node:
            undone = _STOPS[event.kind][0]
            ends = (e.time for e in events[index:] if (e.kind, e.node) == (undone, event.node))
            found.append((event.kind, event.node, event.time, next(ends, math.inf)))
    return found
