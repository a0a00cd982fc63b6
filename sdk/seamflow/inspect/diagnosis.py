"""Findings of why-stuck, and the states and times that its rules read from a snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from seamflow.durations import seconds_of
from seamflow.enum_names import enum_name
from seamflow.inspect.processes import Process
from seamflow.inspect.snapshot import ServerSnapshot, Snapshot
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb

GATEWAY_VERSION_LAG = 1
"""The default of the gateway's `max_version_lag`; it does not report the configured value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause of waiting."""

    rule: str
    """Stable name of the rule, for programs."""
    sentence: str
    """Which component waits for what."""
    cure: str
    since: float | None = None
    """Unix time at which the wait began, or a time after which it must have begun."""
    subject: str = ""
    """The service that is waited for, by its name in `Snapshot.problems`; empty: none in
    particular."""
    normal: bool = False
    """True if this is expected operation and needs no action."""


def still_processes(snapshot: Snapshot) -> list[Process]:
    """Processes that a signal has stopped, or that accept connections and answer none."""
    return [each.process for each in snapshot.processes if each.stopped or each.is_silent]


def loading_addresses(snapshot: Snapshot) -> set[str]:
    """Where processes of this machine run that do not listen yet."""
    return {
        state.process.address
        for state in snapshot.processes
        if state.process.pid is not None
        and state.is_running
        and not (state.answers or state.is_silent or state.stopped)
    }


def is_trainer(snapshot: Snapshot, *states: trainer_pb.TrainerState.ValueType) -> bool:
    return snapshot.trainer is not None and snapshot.trainer.state in states


def has_enough(snapshot: Snapshot) -> bool:
    ready = snapshot.readiness
    if ready is None:
        return False
    leasable = ready.num_ready_groups - ready.num_kept_back_groups
    return leasable + ready.num_open_groups >= ready.groups_per_step


def counts(ready: sample_pb.Readiness) -> str:
    return (
        f"{ready.num_ready_groups} ready, {ready.num_running_groups} running "
        f"({ready.num_running_rollouts} rollouts), {ready.num_admissible_groups} admissible, "
        f"{ready.num_queued_tasks} tasks queued"
    )


def groups(number: int) -> str:
    return f"{number} group" if number == 1 else f"{number} groups"


def state_of(server: ServerSnapshot) -> server_pb.ServerState.ValueType | None:
    """State of a server; None: it does not answer."""
    return None if server.info is None else server.info.state


def server_state(server: ServerSnapshot) -> str:
    if server.info is None:
        return "does not answer"
    return "is " + enum_name(server_pb.ServerState, server.info.state).lower()


def node_state(node: scheduler_pb.Node) -> str:
    return enum_name(scheduler_pb.NodeState, node.state).lower()


def activity(node: scheduler_pb.Node) -> str:
    assigned = node.assignment
    gang = f" {assigned.node_index + 1}/{assigned.num_gang_nodes}" if assigned.gang_id else ""
    lent = " (lent)" if assigned.lent else ""
    return f"{assigned.tag or 'nothing'}{gang}{lent}"


def is_current(snapshot: Snapshot, server: ServerSnapshot) -> bool:
    """Whether the server's weights are recent enough for a gateway to send it turns."""
    if snapshot.manifest is None or server.info is None:
        return True
    return server.info.weight_version >= snapshot.manifest.weight_version - GATEWAY_VERSION_LAG


def published(snapshot: Snapshot) -> float | None:
    """Unix time of the last publish; a waiting trainer began to wait after it."""
    if snapshot.manifest is None or not snapshot.manifest.HasField("commit_time"):
        return None
    return seconds_of(snapshot.manifest.commit_time)


def created(snapshot: Snapshot) -> float | None:
    """Unix time at which the oldest running rollout began."""
    oldest = snapshot.oldest_rollout
    if oldest is None or not oldest.HasField("create_time"):
        return None
    return seconds_of(oldest.create_time)


def heartbeat(node: scheduler_pb.Node) -> float | None:
    """Unix time of the node's last heartbeat."""
    return seconds_of(node.heartbeat_time) if node.HasField("heartbeat_time") else None


def last_event(snapshot: Snapshot, kind: str, node_id: str | None = None) -> float | None:
    """Unix time of the newest event of `kind` in the audit log, for one node or any."""
    times = (
        seconds_of(event.event_time)
        for event in reversed(snapshot.events)
        if event.kind == kind and node_id in (None, event.node.node_id)
    )
    return next(times, None)
