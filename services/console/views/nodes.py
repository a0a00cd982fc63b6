"""What the nodes of a run were at work on, from the scheduler's audit log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from seamflow.durations import seconds_of
from seamflow.inspect.diagnosis import node_state
from seamflow.inspect.run_files import json_lines
from seamflow.inspect.snapshot import ServerSnapshot
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from services.console.sources.run_store import AllocationLog, RunStore
from services.console.sources.shown_runs import ShownRun

Values = dict[str, Any]
_REPORTED = "reported"
"""Kind of an event that a heartbeat caused: it tells what a node does, and decides nothing."""
_TRACE_COLOURS = {
    "rollout": "thread_state_running",
    "training": "good",
    "lent": "rail_animation",
    "switching": "yellow",
    "idle": "grey",
    "stopped": "black",
    "lost": "terrible",
}


@dataclass(slots=True)
class _Node:
    node: pb.Node
    spans: list[Values] = field(default_factory=list)


async def ended_history(store: RunStore, run: ShownRun) -> Values:
    """Of a run whose services have ended, up to then: a scheduler that reads it adds events."""
    log = AllocationLog(store)
    try:
        arrivals = logged_arrivals(run.folder)
        return node_history(await log.events(), arrivals, run.end, run.stops())
    finally:
        await log.close()


def node_history(
    events: Iterable[pb.AllocationEvent],
    arrivals: Iterable[Arrival],
    end: float,
    stops: Sequence[tuple[float, float]] = (),
) -> Values:
    """Spans of the nodes up to `end`, and what was decided; events come oldest first.

    `stops`: periods in which the run was stopped, in order.
    """
    nodes: dict[str, _Node] = {}
    audit = []
    for event in events:
        time = seconds_of(event.event_time)
        if time > end:
            break
        if event.kind != _REPORTED:
            audit.append(_entry(event, time))
        if event.HasField("node"):
            _add(nodes.setdefault(event.node.node_id, _Node(event.node)), event, time)
    for known in nodes.values():
        known.spans[-1]["end"] = end
        known.spans = list(_with_stops(known.spans, stops))
    return {
        "nodes": [_values(each, arrivals) for each in nodes.values()],
        "audit": audit,
        "end": end,
    }


def _add(known: _Node, event: pb.AllocationEvent, time: float) -> None:
    """A new span where the activity changed."""
    activity = _activity(event.node)
    if known.spans and known.spans[-1]["activity"] == activity:
        known.node = event.node
        return
    if known.spans:
        known.spans[-1]["end"] = time
    known.node = event.node
    known.spans.append(
        {"activity": activity, "start": time, "end": time, "reason": event.cause or event.kind}
        | {"numbers": _numbers(event)}
    )


def _with_stops(spans: Iterable[Values], stops: Sequence[tuple[float, float]]) -> Iterator[Values]:
    """The spans with what lies in a stop as spans of their own: no process was there.

    What follows up to the node's next event is its start.
    """
    for span in map(dict, spans):
        start, end = span["start"], span["end"]
        for begin, stop in stops:
            if begin < end and stop > start:
                if start < begin:
                    yield {**span, "start": start, "end": begin}
                stopped = {"start": max(start, begin), "end": min(stop, end)}
                yield {
                    "activity": "stopped",
                    "reason": "the run was stopped",
                    "numbers": {},
                } | stopped
                start = min(stop, end)
                span |= {"activity": "switching", "reason": "the run starts again"}
        if start < end or span["start"] == end:
            yield {**span, "start": start}


def _activity(node: pb.Node) -> str:
    """rollout, training, another tag, lent, switching, idle or lost."""
    if node.state == pb.NODE_STATE_LOST:
        return "lost"
    tag = node.assignment.tag
    if node.state != pb.NODE_STATE_ACTIVE or node.reported_epoch < node.assignment.epoch:
        return "switching" if tag and node.state != pb.NODE_STATE_IDLE else "idle"
    if node.assignment.lent:
        return "lent"
    return {"train": "training", "": "idle"}.get(tag, tag)


def _entry(event: pb.AllocationEvent, time: float) -> Values:
    about = event.node.node_id if event.HasField("node") else event.run_id
    return {
        "time": time,
        "kind": event.kind,
        "node": event.node.node_id if event.HasField("node") else None,
        "text": f"{about}: {event.kind}".strip(": "),
        "reason": event.cause,
        "numbers": _numbers(event),
    }


def _numbers(event: pb.AllocationEvent) -> Mapping[str, float]:
    """What the node had measured."""
    if not event.HasField("node"):
        return {}
    node = event.node
    switches = {
        f"seconds to {tag}": seconds_of(duration)
        for tag, duration in sorted(node.switch_durations.items())
    }
    return {"epoch": node.assignment.epoch, **{k: round(v, 3) for k, v in switches.items()}}


def _values(known: _Node, arrivals: Iterable[Arrival]) -> Values:
    own = known.node.node_id
    return {
        "id": known.node.node_id,
        "kinds": list(known.node.capability_tags),
        "state": node_state(known.node),
        "spans": known.spans,
        "arrivals": [
            {"version": each.version, "time": each.time, "server": each.server}
            for each in arrivals
            if each.server == own or each.server.startswith(f"{own}-")
        ],
    }


def chrome_trace(history: Values) -> Values:
    """The same for chrome://tracing and Perfetto: a track for each node; times in microseconds."""
    events: list[Values] = []
    for number, node in enumerate(history["nodes"], 1):
        name = {"name": "thread_name", "ph": "M", "pid": 1, "tid": number}
        events.append({**name, "args": {"name": node["id"]}})
        events += [_slice(span, number) for span in node["spans"]]
        events += [
            {"name": f"v{each['version']}", "ph": "i", "s": "t", "pid": 1, "tid": number}
            | {"ts": each["time"] * 1e6, "args": {"server": each["server"]}}
            for each in node["arrivals"]
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(span: Values, number: int) -> Values:
    return {
        "name": span["activity"],
        "ph": "X",
        "pid": 1,
        "tid": number,
        "ts": span["start"] * 1e6,
        "dur": (span["end"] - span["start"]) * 1e6,
        "cname": _TRACE_COLOURS.get(span["activity"], "generic_work"),
        "args": {"reason": span["reason"], **span["numbers"]},
    }


@dataclass(frozen=True, slots=True)
class Arrival:
    """A server has loaded a version."""

    server: str
    """Its name: that of its node, with a number where the node has several."""
    version: int
    time: float
    """Unix time, by the server's clock."""


def reported_arrivals(servers: Iterable[ServerSnapshot]) -> list[Arrival]:
    """The newest 64 of each server that answers."""
    return [
        Arrival(server.info.server_id, each.weight_version, seconds_of(each.load_time))
        for server in servers
        if server.info is not None
        for each in server.info.loaded_versions
    ]


def logged_arrivals(folder: Path | None) -> list[Arrival]:
    """All that the logs in a run's folder tell; none without them."""
    files = [] if folder is None else sorted((folder / "logs").glob("rollout_server-*.log"))
    return [arrival for file in files for arrival in _logged(file)]


def _logged(file: Path) -> Iterator[Arrival]:
    for line in json_lines(file):
        if line.get("msg") == "weights_loaded" and isinstance(line.get("weight_version"), int):
            time = datetime.fromisoformat(str(line["ts"])).timestamp()
            yield Arrival(str(line["instance"]), line["weight_version"], time)
