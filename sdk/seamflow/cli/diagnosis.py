"""What a finding is, and the words and times that the rules of why-stuck read from the facts."""

from __future__ import annotations

from dataclasses import dataclass

from seamflow.cli.snapshot import Facts, ServerFacts
from seamflow.durations import seconds_of
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb

__all__ = [
    "GATEWAY_VERSION_LAG",
    "Finding",
    "activity",
    "counts",
    "created",
    "groups",
    "has_enough",
    "heartbeat",
    "is_current",
    "is_trainer",
    "last_event",
    "node_state",
    "published",
    "server_state",
    "state_of",
]

GATEWAY_VERSION_LAG = 1
"""The gateway's default; it does not tell its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that waits."""

    rule: str
    """Stable name of the rule, for programs."""
    sentence: str
    """Who waits for what."""
    cure: str
    """What to do; where nothing need be done, what will end the wait."""
    since: float | None = None
    """Unix time at which the wait began, or a time after which it must have begun."""
    normal: bool = False
    """True where this is how things work and it will pass by itself."""


def is_trainer(facts: Facts, *states: trainer_pb.TrainerState.ValueType) -> bool:
    """Whether the trainer answered and is in one of `states`."""
    return facts.trainer is not None and facts.trainer.state in states


def has_enough(facts: Facts) -> bool:
    """Whether enough groups are ready for a step."""
    ready = facts.readiness
    if ready is None:
        return False
    leasable = ready.num_ready_groups - ready.num_kept_back_groups
    return leasable + ready.num_open_groups >= ready.groups_per_step


def counts(ready: sample_pb.GetReadinessResponse) -> str:
    """The groups in words."""
    return (
        f"{ready.num_ready_groups} ready, {ready.num_running_groups} running "
        f"({ready.num_running_rollouts} rollouts), {ready.num_admissible_groups} admissible, "
        f"{ready.num_queued_tasks} tasks queued"
    )


def groups(number: int) -> str:
    """A number of groups in words."""
    return f"{number} group" if number == 1 else f"{number} groups"


def state_of(server: ServerFacts) -> server_pb.ServerState.ValueType | None:
    """State of a server; None: it does not answer."""
    return None if server.info is None else server.info.state


def server_state(server: ServerFacts) -> str:
    """State of a server in words."""
    if server.info is None:
        return "does not answer"
    name = server_pb.ServerState.Name(server.info.state)
    return "is " + name.removeprefix("SERVER_STATE_").lower()


def node_state(node: scheduler_pb.Node) -> str:
    """State of a node in words."""
    return scheduler_pb.NodeState.Name(node.state).removeprefix("NODE_STATE_").lower()


def activity(node: scheduler_pb.Node) -> str:
    """What a node shall do, in words."""
    lent = " (lent)" if node.assignment.lent else ""
    return f"{node.assignment.tag or 'nothing'}{lent}"


def is_current(facts: Facts, server: ServerFacts) -> bool:
    """Whether a gateway would send turns to the server as far as weights go."""
    if facts.manifest is None or server.info is None:
        return True
    return server.info.weight_version >= facts.manifest.weight_version - GATEWAY_VERSION_LAG


def published(facts: Facts) -> float | None:
    """The last publish: a trainer that waits began to wait after it."""
    if facts.manifest is None or not facts.manifest.HasField("commit_time"):
        return None
    return seconds_of(facts.manifest.commit_time)


def created(facts: Facts) -> float | None:
    """When the oldest running rollout began."""
    oldest = facts.oldest_rollout
    if oldest is None or not oldest.HasField("create_time"):
        return None
    return seconds_of(oldest.create_time)


def heartbeat(node: scheduler_pb.Node) -> float | None:
    """When the scheduler last heard of the node."""
    return seconds_of(node.heartbeat_time) if node.HasField("heartbeat_time") else None


def last_event(facts: Facts, kind: str, node_id: str | None = None) -> float | None:
    """When the audit log last told of `kind`, for one node or any."""
    times = (
        seconds_of(event.event_time)
        for event in reversed(facts.events)
        if event.kind == kind and node_id in (None, event.node.node_id)
    )
    return next(times, None)
