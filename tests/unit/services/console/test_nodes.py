"""What nodes did, from the audit log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from services.console.views.nodes import Arrival, chrome_trace, logged_arrivals, node_history


def event(time: int, kind: str, cause: str, **node: Any) -> pb.AllocationEvent:
    """An entry about node a."""
    given = {"state": pb.NODE_STATE_ACTIVE, **node}
    tag, lent = given.pop("tag", ""), given.pop("lent", False)
    assignment = pb.Assignment(tag=tag, lent=lent, epoch=1)
    about = pb.Node(node_id="a", assignment=assignment, reported_epoch=1, **given)
    return pb.AllocationEvent(
        event_time=Timestamp(seconds=time), kind=kind, cause=cause, node=about
    )


EVENTS = [
    event(10, "registered", "registered", state=pb.NODE_STATE_IDLE),
    event(12, "reported", "heartbeat", tag="train"),
    event(15, "assigned", "gang released", tag="rollout", lent=True),
    event(16, "reported", "heartbeat", tag="rollout", lent=True),
    event(20, "lost", "no heartbeat", state=pb.NODE_STATE_LOST, tag="rollout"),
]


def test_spans_follow_each_other() -> None:
    """One for each activity, with the reason that began it; the last one ends now."""
    (node,) = node_history(EVENTS, (), 30.0)["nodes"]
    spans = [(s["activity"], s["start"], s["end"], s["reason"]) for s in node["spans"]]
    assert spans == [
        ("idle", 10, 12, "registered"),
        ("training", 12, 15, "heartbeat"),
        ("lent", 15, 20, "gang released"),
        ("lost", 20, 30, "no heartbeat"),
    ]


def test_a_stopped_period_is_no_idle_one() -> None:
    """It is cut out of all that it touches, once; control: without stops nothing is cut."""
    (node,) = node_history(EVENTS, (), 30.0, [(13, 17), (26, 28)])["nodes"]
    spans = [(s["activity"], s["start"], s["end"]) for s in node["spans"]]
    assert spans == [
        ("idle", 10, 12),
        ("training", 12, 13),
        ("stopped", 13, 15),
        ("stopped", 15, 17),
        ("switching", 17, 20),
        ("lost", 20, 26),
        ("stopped", 26, 28),
        ("switching", 28, 30),
    ]


def test_decisions_have_no_heartbeats() -> None:
    """They begin spans, and are none of the scheduler's decisions."""
    audit = node_history(EVENTS, (), 30.0)["audit"]
    assert [entry["kind"] for entry in audit] == ["registered", "assigned", "lost"]


def test_what_came_after_the_end_is_left_out() -> None:
    """A scheduler that serves a finished run finds its nodes lost."""
    history = node_history(EVENTS, (), 18.0)
    assert [s["activity"] for s in history["nodes"][0]["spans"]][-1] == "lent"
    assert len(history["audit"]) == 2


def test_a_trace_has_a_slice_for_each_span() -> None:
    """In microseconds, with arrivals of weights as instants."""
    trace = chrome_trace(node_history(EVENTS, [Arrival("a", 3, 13.0), Arrival("b", 3, 13.0)], 30.0))
    slices = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert [(s["name"], s["ts"], s["dur"]) for s in slices[:2]] == [
        ("idle", 10e6, 2e6),
        ("training", 12e6, 3e6),
    ]
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "i"] == ["v3"]


def test_arrivals_are_read_from_logs(tmp_path: Path) -> None:
    """Other lines, and lines that are no JSON, are left out."""
    (tmp_path / "logs").mkdir()
    loaded = {"msg": "weights_loaded", "instance": "a", "weight_version": 2}
    lines = (
        json.dumps({**loaded, "ts": "1970-01-01T00:00:05Z"}),
        json.dumps({"msg": "ready", "ts": "1970-01-01T00:00:06Z"}),
        "Traceback",
    )
    (tmp_path / "logs" / "rollout_server-a.log").write_text("\n".join(lines))
    assert logged_arrivals(tmp_path) == [Arrival("a", 2, 5.0)]
    assert logged_arrivals(None) == []
