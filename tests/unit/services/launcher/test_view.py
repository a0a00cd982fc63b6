"""The live view shows the state of the services."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console
from seamflow.inspect.lives import Life
from seamflow.inspect.progress import seconds_left
from seamflow.inspect.snapshot import ServerSnapshot, Snapshot
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb

from services.launcher.report.view import LiveView


def make_snapshot() -> Snapshot:
    """Two nodes, one of them lent."""
    nodes = tuple(
        scheduler_pb.Node(
            node_id=name,
            capability_tags=tags,
            assignment=scheduler_pb.Assignment(tag="rollout", lent=len(tags) > 1),
            state=scheduler_pb.NODE_STATE_ACTIVE,
        )
        for name, tags in (("node-a", ["rollout"]), ("node-b", ["rollout", "train"]))
    )
    server = server_pb.GetServerInfoResponse(
        weight_version=11, num_running=9, tokens_per_second=700
    )
    return Snapshot(
        readiness=sample_pb.Readiness(num_ready_groups=3, num_running_rollouts=40),
        nodes=nodes,
        trainer=trainer_pb.GetStatusResponse(step=12, num_steps=80, weight_version=12),
        servers=(ServerSnapshot(node_id="node-a", address="a:1", info=server),),
    )


def shown(view: LiveView) -> str:
    """The panel as text."""
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(view.renderable())
    return console.export_text()


def test_the_panel_shows_reward_versions_and_who_is_lent(tmp_path: Path) -> None:
    """The panel has all key values of a running run."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 12, "reward_mean": 0.75}) + "\n")
    view = LiveView("demo", metrics)
    view.show(make_snapshot())
    text = shown(view)
    for part in ("demo", "0.750", "published v12", "groups 3 ready", "rollout (lent)", "700"):
        assert part in text


def test_a_panel_without_answers_is_still_drawn(tmp_path: Path) -> None:
    """At the start no service answers yet."""
    view = LiveView("demo", tmp_path / "none.jsonl")
    silent = Snapshot(readiness=None, nodes=(), trainer=None, servers=())
    view.show(silent)
    assert "no optimizer step yet" in shown(view)


def test_the_time_that_is_left_is_known_from_the_second_step_on(tmp_path: Path) -> None:
    """However long steps are; a stop between two steps is no step."""
    metrics = tmp_path / "metrics.jsonl"
    steps = [{"step": i, "reward_mean": 0.5, "time": 140.0 * i} for i in (1, 2)]
    metrics.write_text(json.dumps(steps[0]) + "\n")
    view = LiveView("demo", metrics)
    view.progress(1, 10)
    assert "left" not in shown(view)
    metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    view.progress(2, 10)
    assert "about 19 min left" in shown(view)
    stopped = [Life(start=0.0, end=300.0, state="killed"), Life(start=4000.0)]
    late = [*steps, {"step": 3, "time": 4100.0}]
    assert seconds_left(late, 10, stopped) == 140.0 * 7
    assert seconds_left(late[1:], 10, stopped) is None
    assert seconds_left(late[1:], 10) == 3820.0 * 7, "control"
