"""The live view shows the state of the services."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console
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
