"""Conversion between protobuf messages and the scheduler's records, with validation.

What reads a request raises `ServiceError` INVALID_ARGUMENT for a field that is wrong.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from google.protobuf.duration_pb2 import Duration
from seamflow.durations import seconds_of, to_duration, to_timestamp
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from scheduler.model.lending_state import BatchForecast
from scheduler.model.records import (
    ROLLOUT,
    AllocationEvent,
    Assignment,
    Gang,
    Hardware,
    Node,
    NodeState,
    RunPolicy,
    State,
    Tail,
    Worker,
)
from scheduler.model.stage_balance import SplitAdvice, StageBalance
from scheduler.policy.placement import train_priority
from scheduler.policy.tail_migration import MeasuredBatch
from services.chassis.errors import invalid_argument
from services.chassis.rpc.fields import message_of, not_negative, record_of, required

_STATES = {state: pb.NodeState.Value(f"NODE_STATE_{state.name}") for state in NodeState}
_ADVICE = {
    SplitAdvice.KEEP: pb.SPLIT_ADVICE_KEEP,
    SplitAdvice.ADD_GENERATION: pb.SPLIT_ADVICE_ADD_GENERATION,
}
_REPORTABLE: dict[int, NodeState] = {
    number: state for state, number in _STATES.items() if state is not NodeState.LOST
}


def node_record(request: pb.RegisterNodeRequest) -> Node:
    required("node_id", request.node_id)
    required("run_id", request.run_id)
    tags = tuple(sorted(set(request.capability_tags)))
    if not tags or "" in tags:
        raise invalid_argument("capability_tags", list(tags), "give at least one, none empty")
    for worker in request.workers:
        if worker.tag not in tags:
            raise invalid_argument("workers.tag", worker.tag, "use one of capability_tags")
    hardware = Hardware(
        memory_bytes_per_second=not_negative(
            "hardware.memory_bytes_per_second", request.hardware.memory_bytes_per_second
        ),
        flops=not_negative("hardware.flops", request.hardware.flops),
        device_bytes=request.hardware.device_bytes,
    )
    return Node(
        node_id=request.node_id,
        run_id=request.run_id,
        capability_tags=tags,
        workers=tuple(record_of(Worker, entry) for entry in request.workers),
        train_priority=request.train_priority
        or train_priority(hardware.memory_bytes_per_second, hardware.flops),
        hardware=hardware,
    )


def switch_seconds(request: pb.HeartbeatRequest) -> float | None:
    """Seconds of the node's last switch, if it made one."""
    if not request.HasField("switch_duration"):
        return None
    return not_negative("switch_duration", seconds_of(request.switch_duration))


def forecast_record(request: pb.ReleaseNodesRequest) -> BatchForecast | None:
    if not request.HasField("forecast"):
        return None
    remaining, batch = request.forecast.remaining_rollouts, request.forecast.batch_rollouts
    if batch < 1:
        raise invalid_argument("forecast.batch_rollouts", batch, "give at least 1")
    if not 0 <= remaining <= batch:
        cure = f"give 0 to batch_rollouts ({batch})"
        raise invalid_argument("forecast.remaining_rollouts", remaining, cure)
    done = not_negative("forecast.done_rollouts", request.forecast.done_rollouts)
    return BatchForecast(
        remaining_rollouts=remaining,
        batch_rollouts=batch,
        done_rollouts=done,
        done_tokens=not_negative("forecast.done_tokens", request.forecast.done_tokens),
    )


def measured_batch(request: pb.ReleaseNodesRequest) -> MeasuredBatch | None:
    """What the gang measured of its newest batch, if anything."""
    name = "forecast.newest_batch" if request.HasField("forecast") else "newest_batch"
    holder = request.forecast if request.HasField("forecast") else request
    if not holder.HasField("newest_batch"):
        return None
    given = holder.newest_batch
    groups = tuple(tuple(group.rollout_tokens) for group in given.groups)
    if not groups or not all(group and min(group) >= 1 for group in groups):
        cure = "give at least one group, each with at least one rollout of at least one token"
        raise invalid_argument(f"{name}.groups", f"{len(groups)} groups", cure)
    return MeasuredBatch(
        groups=groups,
        training_seconds=not_negative(
            f"{name}.training_duration", seconds_of(given.training_duration)
        ),
        prompt_tokens=not_negative(f"{name}.prompt_tokens", given.prompt_tokens),
    )


def tail_message(tail: Tail | None) -> pb.Tail | None:
    """The start of a gang as a message."""
    if tail is None:
        return None
    return pb.Tail(remaining_rollouts=tail.remaining, num_nodes=tail.num_kept)


def run_policy_record(request: pb.SetRunPolicyRequest) -> RunPolicy:
    required("run_id", request.run_id)
    policy = request.policy
    return record_of(
        RunPolicy,
        policy,
        max_nodes=not_negative("policy.max_nodes", policy.max_nodes),
        rollout_share=not_negative("policy.rollout_share", policy.rollout_share) or 1.0,
    )


def state_record(state: int) -> NodeState:
    if state not in _REPORTABLE:
        raise invalid_argument("state", state, "report IDLE, ACTIVATING, ACTIVE or DRAINING")
    return _REPORTABLE[state]


def gang_record(request: pb.RequestNodesRequest) -> Gang:
    for field in ("run_id", "gang_id", "tag"):
        required(field, getattr(request, field))
    if request.tag == ROLLOUT:
        cure = "nodes outside of gangs do rollout without a request"
        raise invalid_argument("tag", request.tag, cure)
    if request.num_nodes < 1:
        raise invalid_argument("num_nodes", request.num_nodes, "request at least 1")
    _check_gang_nodes(request)
    needed = request.HasField("needed_time")
    return record_of(
        Gang,
        request,
        node_ids=tuple(sorted(request.node_ids)),
        batch=batch_number(request),
        needed_time=seconds_of(request.needed_time) if needed else None,
        unit_nodes=not_negative("unit_nodes", request.unit_nodes),
        done_tokens=not_negative("done_tokens", request.done_tokens),
    )


def _check_gang_nodes(request: pb.RequestNodesRequest) -> None:
    names = set(request.node_ids)
    if request.node_ids and (len(names) != len(request.node_ids) or "" in names):
        cure = "name each node once, or none at all"
        raise invalid_argument("node_ids", ", ".join(request.node_ids), cure)
    if names and len(names) != request.num_nodes:
        cure = f"name {request.num_nodes}, as num_nodes says, or none at all"
        raise invalid_argument("node_ids", f"{len(names)} nodes", cure)
    if request.unit_nodes and request.max_nodes < request.num_nodes:
        cure = f"give at least num_nodes, which is {request.num_nodes}, or no unit_nodes"
        raise invalid_argument("max_nodes", request.max_nodes, cure)


def batch_number(request: pb.RequestNodesRequest | pb.ReleaseNodesRequest) -> int:
    """Number of the batch that the nodes are for; 0: unspecified."""
    return not_negative("batch", request.batch)


def wait_seconds(wait: Duration, limit: float) -> float:
    seconds = seconds_of(wait)
    if not 0 <= seconds <= limit:
        raise invalid_argument("wait", seconds, f"wait between 0 and {limit:g} seconds")
    return seconds


def assignment_message(assignment: Assignment) -> pb.Assignment:
    return message_of(
        pb.Assignment,
        assignment,
        node_index=assignment.rank_offset,
        num_gang_nodes=assignment.world_size,
    )


def run_messages(state: State) -> list[pb.Run]:
    """Every run that has nodes, gangs or a policy, sorted by id."""
    standing: dict[str, Counter[str]] = defaultdict(Counter)
    for node in state.nodes.values():
        for run_id in node.runs:
            standing[run_id].update(())
        if node.assignment.tag:
            standing[node.assigned_run][node.assignment.tag] += 1
    waiting = state.waiting()
    stage_times: dict[str, list[pb.StageTimes]] = defaultdict(list)
    for (run_id, gang_id), balance in sorted(state.balances.items(), key=lambda item: item[0]):
        stage_times[run_id] += _stage_times_messages(gang_id, balance)
    names = {*standing, *state.runs, *(gang.run_id for gang in state.gangs.values())}
    return [
        pb.Run(
            run_id=run_id,
            policy=message_of(pb.RunPolicy, state.runs.get(run_id, RunPolicy())),
            num_nodes=standing[run_id],
            waiting_gang_ids=[gang.gang_id for gang in waiting if gang.run_id == run_id],
            stage_times=stage_times[run_id],
        )
        for run_id in sorted(names)
    ]


def node_message(node: Node, heartbeat_time: float | None = None) -> pb.Node:
    """The node as a message, with the time of its last heartbeat."""
    return message_of(
        pb.Node,
        node,
        workers=[message_of(pb.Worker, worker) for worker in node.workers],
        assignment=assignment_message(node.assignment),
        state=_STATES[node.state],
        heartbeat_time=None if heartbeat_time is None else to_timestamp(heartbeat_time),
        hardware=message_of(pb.Hardware, node.hardware),
        switch_durations={tag: to_duration(s) for tag, s in node.switch_seconds.items()},
    )


def event_message(event: AllocationEvent) -> pb.AllocationEvent:
    """The entry of the audit log as a message."""
    return message_of(
        pb.AllocationEvent,
        event,
        event_time=to_timestamp(event.time),
        node=None if event.node is None else node_message(event.node),
        kind=event.kind.value,
    )


def _stage_times_messages(gang_id: str, balance: StageBalance) -> list[pb.StageTimes]:
    """The stage times of a gang; none while they are not measured."""
    if balance.node_counts is None or balance.advice is SplitAdvice.UNKNOWN:
        return []
    message = pb.StageTimes(
        gang_id=gang_id,
        num_generation_nodes=balance.node_counts.generating,
        num_training_nodes=balance.node_counts.training,
        generation_duration=to_duration(balance.generation_seconds),
        training_duration=to_duration(balance.training_seconds),
        advice=_ADVICE[balance.advice],
    )
    return [message]
