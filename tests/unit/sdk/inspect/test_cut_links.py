"""A cut link is told from a process that is away, and takes the blame alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from seamflow.errors import NotFoundError, SeamflowError, UnavailableError
from seamflow.inspect.diagnosis import Finding
from seamflow.inspect.snapshot import ServerSnapshot
from seamflow.inspect.why_stuck import why_stuck
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb

from tests.unit.sdk.inspect.test_why_stuck import HEALTHY, NOW, node, server

WEST, EAST = ("scheduler", "trainer", "weights"), ("trajectory_manager", "gateway")
ADDRESSES = {
    **{name: f"10.0.0.1:{port}" for port, name in enumerate(WEST, 1)},
    **{name: f"10.0.0.2:{port}" for port, name in enumerate(EAST, 1)},
}
ZONES = {"10.0.0.1": "west", "10.0.0.2": "east"}
BEYOND = "10.0.0.2:9"
"""Of the rollout server in the east."""
SILENT = UnavailableError("connection timed out")


def findings(
    silent: Iterable[str], error: SeamflowError = SILENT, **changes: object
) -> Mapping[str, Finding]:
    """What is found by rule while these services do not answer."""
    problems = dict.fromkeys(silent, error)
    unknown = {"nodes": None, "servers": ()} if "scheduler" in problems else {}
    given = {"addresses": ADDRESSES, "zones": ZONES, "problems": problems, **unknown, **changes}
    return {f.rule: f for f in why_stuck(dataclasses.replace(HEALTHY, **given))}  # type: ignore[arg-type]


def eastern_node(state: str) -> scheduler_pb.Node:
    """One that rolls out, whose server is in the east."""
    return node(state=state, workers=[scheduler_pb.Worker(tag="rollout", address=BEYOND)])


def eastern_server(*, answers: bool) -> ServerSnapshot:
    """Its rollout server."""
    return dataclasses.replace(server("SERVING" if answers else None), address=BEYOND)


def test_seen_from_generation_the_link_to_training_is_named() -> None:
    """By zone, host and what stands there; no service is blamed besides."""
    found = findings(WEST)
    assert "The link to zone 'west' (10.0.0.1) is cut" in found["link_cut"].sentence
    assert "(scheduler, trainer, weights service)" in found["link_cut"].sentence
    assert not found["link_cut"].normal
    assert "service_does_not_answer" not in found


def test_seen_from_training_it_is_cut_since_the_last_heartbeat_from_there() -> None:
    """Its nodes are not reported as lost, too."""
    found = findings(EAST, nodes=(eastern_node("LOST"),), servers=(eastern_server(answers=False),))
    assert "zone 'east' (10.0.0.2)" in found["link_cut"].sentence
    assert "rollout server of n0, node n0" in found["link_cut"].sentence
    assert found["link_cut"].since == NOW - 45
    assert "node_lost" not in found


def test_what_fails_besides_a_link_is_told_besides() -> None:
    """A service on this side."""
    found = findings((*WEST, EAST[0]))
    assert "zone 'west'" in found["link_cut"].sentence
    assert "trajectory manager" in found["service_does_not_answer"].sentence


def test_a_host_without_a_zone_has_its_own_name() -> None:
    """Zones are for nodes; a run may have none."""
    assert "The link to 10.0.0.1 is cut" in findings(WEST, zones={})["link_cut"].sentence


def test_what_is_no_link_is_not_called_one() -> None:
    """A part of a place is away, all of all places, one service alone, or one that refuses."""
    assert "link_cut" not in findings(())
    assert "link_cut" not in findings(WEST[:2])
    assert "link_cut" not in findings((*WEST, *EAST))
    assert "link_cut" not in findings(WEST, NotFoundError("no run"))
    alone = {**dict.fromkeys(ADDRESSES, "10.0.0.2:1"), "trainer": "10.0.0.1:1"}
    assert "link_cut" not in findings(("trainer",), addresses=alone)
    assert "service_does_not_answer" in findings(("trainer",), addresses=alone)


def test_a_lost_node_whose_server_answers_is_out_of_reach_of_the_scheduler() -> None:
    """Who asks reaches both, so the link between the two is to be looked at."""
    nodes, servers = (eastern_node("LOST"),), (eastern_server(answers=True),)
    assert (
        "link between it and the scheduler"
        in findings((), nodes=nodes, servers=servers)["node_lost"].cure
    )
    silent = (eastern_server(answers=False),)
    assert "link" not in findings((), nodes=nodes, servers=silent)["node_lost"].cure
