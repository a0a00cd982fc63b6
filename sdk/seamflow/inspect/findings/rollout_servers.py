"""No rollout server takes turns, or the gateway has ejected one."""

from __future__ import annotations

from collections.abc import Iterator

from seamflow.durations import seconds_of
from seamflow.inspect.diagnosis import (
    GATEWAY_VERSION_LAG,
    Finding,
    created,
    is_current,
    is_trainer,
    last_event,
    published,
    server_state,
    state_of,
)
from seamflow.inspect.snapshot import ServerSnapshot, Snapshot
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb


def no_server_serves(snapshot: Snapshot) -> Iterator[Finding]:
    """Rollouts are running and no server may take their turns."""
    if (
        snapshot.readiness is None
        or not snapshot.readiness.num_running_rollouts
        or snapshot.nodes is None
    ):
        return
    waiting = f"{snapshot.readiness.num_running_rollouts} rollouts wait for a rollout server"
    if not snapshot.servers:
        yield Finding(
            rule="no_rollout_servers",
            sentence=f"{waiting}: no node offers one.",
            cure="Start a node agent whose node has the tag rollout and a rollout worker.",
            since=created(snapshot),
        )
        return
    serving = [s for s in snapshot.servers if state_of(s) == server_pb.SERVER_STATE_SERVING]
    if not serving:
        yield _none_serves(snapshot, waiting)
    elif not any(is_current(snapshot, server) for server in serving):
        yield _all_are_behind(snapshot, waiting, serving)


def _none_serves(snapshot: Snapshot, waiting: str) -> Finding:
    states = ", ".join(f"{s.node_id} at {s.address} {server_state(s)}" for s in snapshot.servers)
    trains = is_trainer(snapshot, trainer_pb.TRAINER_STATE_TRAINING)
    answering = any(server.info is not None for server in snapshot.servers)
    if not answering:
        cure = (
            "Their logs, and those of their node agents, say why. An agent restarts a server that "
            "ended; one that stands still must be ended. Or their addresses cannot be reached."
        )
    elif trains:
        cure = "They continue when the step is done and nodes return to rollout."
    else:
        cure = (
            "Their nodes must be assigned to rollout: see `seamflow status` and the node agents' "
            "logs."
        )
    return Finding(
        rule="no_server_serves",
        sentence=f"{waiting}: {states}.",
        cure=cure,
        since=last_event(snapshot, "assigned") if answering else _silent_since(snapshot),
        normal=trains and answering,
    )


def _silent_since(snapshot: Snapshot) -> float | None:
    """When a node agent last reported another state of a silent server, or, if that is later, when
    the oldest rollout that still runs began; else when nodes were assigned."""
    nodes = {server.node_id for server in snapshot.servers}
    reports = (last_event(snapshot, "reported", node_id) for node_id in nodes)
    known = [time for time in (*reports, created(snapshot)) if time is not None]
    return max(known, default=last_event(snapshot, "assigned"))


def _all_are_behind(snapshot: Snapshot, waiting: str, serving: list[ServerSnapshot]) -> Finding:
    assert snapshot.manifest is not None
    versions = ", ".join(
        f"{server.info.server_id} has v{server.info.weight_version}"
        for server in serving
        if server.info is not None
    )
    return Finding(
        rule="no_current_server",
        sentence=f"{waiting} with allowed weights: the newest committed version is "
        f"v{snapshot.manifest.weight_version}, {versions}.",
        cure="Servers load new weights automatically; if this persists, see their logs. The "
        "gateway allows max_version_lag versions behind "
        f"({GATEWAY_VERSION_LAG} by default).",
        since=published(snapshot),
    )


def ejected_servers(snapshot: Snapshot) -> Iterator[Finding]:
    """Servers to which the gateway sends no turns, as turns failed there."""
    for use in snapshot.server_uses:
        if use.ejection not in (rollout_pb.EJECTION_EJECTED, rollout_pb.EJECTION_PROBED):
            continue
        left = seconds_of(use.ejection_left)
        then = f"for {left:.0f} s more" if left > 0 else "but one turn at a time"
        yield Finding(
            rule="server_ejected",
            sentence=f"The rollout server {use.server_id or '(silent)'} at {use.address} gets no "
            f"turns {then}: {use.ejection_cause}.",
            cure="See its log and restart it; the gateway takes it back once its turns end well.",
        )
