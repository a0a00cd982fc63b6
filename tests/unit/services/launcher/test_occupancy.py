"""Each second of a node counts as one thing, and waiting counts as idle."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest
from seamflow.durations import to_duration
from seamflow.inspect.snapshot import ServerSnapshot, Snapshot
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

from services.launcher.report.occupancy import CoresBusy, Occupancy, observed_activity


def node(
    tag: str,
    *,
    state: scheduler_pb.NodeState.ValueType = scheduler_pb.NODE_STATE_ACTIVE,
    reported: int = 3,
) -> scheduler_pb.Node:
    """A node whose assignment has epoch 3."""
    return scheduler_pb.Node(
        node_id="node-a",
        assignment=scheduler_pb.Assignment(tag=tag, epoch=3),
        reported_epoch=reported,
        state=state,
        switch_durations={"rollout": to_duration(0.25)},
    )


def snapshot(
    of: scheduler_pb.Node,
    *,
    running: int = 0,
    queued: int = 0,
    trainer: trainer_pb.TrainerState.ValueType | None = None,
) -> Snapshot:
    """A snapshot of one node."""
    info = server_pb.GetServerInfoResponse(num_running=running, num_queued=queued)
    status = None if trainer is None else trainer_pb.GetStatusResponse(state=trainer)
    server = ServerSnapshot(node_id="node-a", address="a:1", info=info)
    return Snapshot(nodes=(of,), trainer=status, servers=(server,))


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (snapshot(node("rollout"), running=1), "rollout"),
        (snapshot(node("rollout"), queued=1), "rollout"),
        (snapshot(node("rollout")), "idle"),
        (snapshot(node("train"), trainer=trainer_pb.TRAINER_STATE_TRAINING), "train"),
        (snapshot(node("train"), trainer=trainer_pb.TRAINER_STATE_WAITING), "idle"),
        (snapshot(node("train")), "unknown"),
        (dataclasses.replace(snapshot(node("rollout")), servers=()), "unknown"),
        (snapshot(node("reward")), "reward"),
        (snapshot(node("rollout", reported=2), running=1), "switching"),
        (snapshot(node("rollout", state=scheduler_pb.NODE_STATE_DRAINING), running=1), "switching"),
        (snapshot(node("", state=scheduler_pb.NODE_STATE_IDLE)), "idle"),
        (snapshot(node("train", state=scheduler_pb.NODE_STATE_LOST)), "lost"),
    ],
)
def test_a_node_without_work_is_idle_whatever_its_tag(known: Snapshot, expected: str) -> None:
    """A server without turns and a waiting trainer are idle; unreachable ones are unknown."""
    (of,) = known.nodes or ()
    assert observed_activity(of, known) == expected


def test_shares_cover_the_time_between_first_and_last_snapshot() -> None:
    """Two seconds of sampling, one of switching, one of nothing, and a silent scheduler in it."""
    occupancy = Occupancy()
    occupancy.add(snapshot(node("rollout"), running=1), now=10.0)
    occupancy.add(snapshot(node("rollout"), running=1), now=12.0)
    occupancy.add(snapshot(node("train", reported=2)), now=13.0)
    occupancy.add(dataclasses.replace(snapshot(node("rollout")), nodes=()), now=13.5)
    occupancy.add(snapshot(node("train"), trainer=trainer_pb.TRAINER_STATE_WAITING), now=14.0)
    assert occupancy.shares() == {
        "node-a": {
            "rollout": 0.5,
            "switching": 0.25,
            "idle": 0.25,
            "switch_seconds": {"rollout": 0.25},
        }
    }


def test_a_node_that_was_never_idle_has_an_idle_share_of_zero() -> None:
    """Zero is a value; a run that ended immediately has none."""
    occupancy = Occupancy()
    occupancy.add(snapshot(node("rollout"), running=1), now=0.0)
    assert occupancy.shares() == {}
    occupancy.add(snapshot(node("rollout"), running=1), now=1.0)
    assert occupancy.shares()["node-a"]["idle"] == 0.0


def test_a_core_that_works_is_busy() -> None:
    """Busy with any process."""
    cores, until = CoresBusy(), time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    assert 0.1 < cores.mean() <= (os.cpu_count() or 1) + 0.5


def test_servers_of_one_node_count_together() -> None:
    """An idle one does not hide the work of another, in whatever order; older weights count."""
    serving, released = server_pb.SERVER_STATE_SERVING, server_pb.SERVER_STATE_RELEASED
    infos = [
        server_pb.GetServerInfoResponse(state=serving, num_running=2, weight_version=4),
        server_pb.GetServerInfoResponse(state=released, num_queued=1, weight_version=3),
    ]
    for given in (infos, infos[::-1]):
        servers = tuple(ServerSnapshot(node_id="node-a", address="a", info=each) for each in given)
        known = Snapshot(nodes=(node("rollout"),), servers=servers)
        joint = known.answering_servers["node-a"]
        assert (joint.num_running, joint.num_queued, joint.weight_version) == (2, 1, 3)
        assert joint.state == serving
        assert observed_activity(node("rollout"), known) == "rollout"
