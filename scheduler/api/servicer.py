# ruff: noqa: N802 -- rpcs are named by the contract
"""SchedulerService: translates rpcs into changes of the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import grpc.aio
from seamflow.durations import seconds_of, to_duration
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceServicer

from scheduler.api import conversion
from scheduler.model.records import Node
from scheduler.policy.node_split import Split, StageProfile, split_datacentres, split_nodes
from scheduler.pool.pool import Pool, assignment_differs, gang_granted
from services.chassis import metrics
from services.chassis.errors import invalid_argument, not_found

MAX_NODES = 10_000
"""Largest number of nodes of a split: about 10 ms, in which no heartbeat is answered."""

_TWO_DATACENTRES = ("num_generation_nodes", "num_training_nodes")


def split_message(request: pb.PlanSplitRequest) -> pb.PlanSplitResponse:
    """Compute the requested split.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    split = _split(request)
    return pb.PlanSplitResponse(
        num_generation_nodes=split.generation_nodes,
        num_training_nodes=split.training_nodes,
        generation_duration=to_duration(split.generation_seconds),
        training_duration=to_duration(split.training_seconds),
    )


def _split(request: pb.PlanSplitRequest) -> Split:
    generation = _profile("generation", request.generation)
    training = _profile("training", request.training)
    if request.num_nodes:
        for field in _TWO_DATACENTRES:
            if getattr(request, field):
                cure = "omit it, or omit num_nodes and give both datacentres"
                raise invalid_argument(field, getattr(request, field), cure)
        _check_nodes(request, "num_nodes", generation.nodes[0] + training.nodes[0])
        return split_nodes(generation.seconds, training.seconds, request.num_nodes)
    if not any(getattr(request, field) for field in _TWO_DATACENTRES):
        cure = "give it, or num_generation_nodes and num_training_nodes"
        raise invalid_argument("num_nodes", 0, cure)
    for field, profile in zip(_TWO_DATACENTRES, (generation, training), strict=True):
        _check_nodes(request, field, profile.nodes[0])
    return split_datacentres(
        generation.seconds,
        training.seconds,
        request.num_generation_nodes,
        request.num_training_nodes,
    )


def _profile(field: str, message: pb.StageProfile) -> StageProfile:
    try:
        return StageProfile.of({n: seconds_of(each) for n, each in message.durations.items()})
    except ValueError as error:
        points = f"{len(message.durations)} points"
        raise invalid_argument(f"{field}.durations", points, str(error)) from error


def _check_nodes(request: pb.PlanSplitRequest, field: str, fewest: int) -> None:
    count = getattr(request, field)
    if not fewest <= count <= MAX_NODES:
        cure = f"give {fewest}, the smallest number in the profile, to {MAX_NODES}"
        raise invalid_argument(field, count, cure)


Context = grpc.aio.ServicerContext[Any, Any]

_REQUEST_WAIT_SECONDS = 60.0


class SchedulerServicer(SchedulerServiceServicer):
    """The gRPC service; the rules are in `state_transaction.py` and `allocation_policy.py`.

    Args:
        pool: of nodes.
        lease_seconds: lease of the node agents.
    """

    def __init__(self, pool: Pool, lease_seconds: float) -> None:
        self._pool = pool
        self._lease_seconds = lease_seconds
        self._switches = metrics.histogram(
            "scheduler", "switch_seconds", "Seconds a switch took, by new activity tag.", ("tag",)
        )

    async def RegisterNode(
        self, request: pb.RegisterNodeRequest, context: Context
    ) -> pb.RegisterNodeResponse:
        node = await self._pool.register(conversion.node_record(request))
        return pb.RegisterNodeResponse(
            assignment=conversion.assignment_message(node.assignment),
            lease_duration=to_duration(self._lease_seconds),
        )

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        seconds = conversion.wait_seconds(request.wait, self._lease_seconds / 2)
        state = conversion.state_record(request.state)
        switch_seconds = conversion.switch_seconds(request)
        is_news = await self._pool.heartbeat(
            request.node_id,
            state,
            request.reported_epoch,
            request.known_epoch,
            switch_seconds=switch_seconds,
            report=request.report if request.HasField("report") else None,
        )
        node = self._pool.state.nodes[request.node_id]
        # The switch time of an older assignment does not belong to the present tag.
        is_present = request.reported_epoch == node.assignment.epoch
        if is_news and is_present and switch_seconds is not None:
            self._switches.labels(node.assignment.tag).observe(switch_seconds)
        differs = assignment_differs(request.node_id, request.known_epoch)
        found = await self._pool.until(differs, seconds)
        if request.node_id not in found.nodes:
            raise not_found("node", request.node_id)
        assignment = found.nodes[request.node_id].assignment
        return pb.HeartbeatResponse(assignment=conversion.assignment_message(assignment))

    async def RequestNodes(
        self, request: pb.RequestNodesRequest, context: Context
    ) -> pb.RequestNodesResponse:
        gang = conversion.gang_record(request)
        seconds = conversion.wait_seconds(request.wait, _REQUEST_WAIT_SECONDS)
        await self._pool.request(gang)
        state = await self._pool.until(gang_granted(gang.key), seconds)
        return pb.RequestNodesResponse(
            granted=gang.key in state.gangs and state.granted(gang),
            nodes=[self._message(node) for node in state.members(gang)],
            advised_nodes=self._pool.advised_nodes(gang.key),
        )

    async def ReleaseNodes(
        self, request: pb.ReleaseNodesRequest, context: Context
    ) -> pb.ReleaseNodesResponse:
        key = request.run_id, request.gang_id
        tail = await self._pool.release(
            key,
            conversion.forecast_record(request),
            conversion.batch_number(request),
            conversion.measured_batch(request),
        )
        return pb.ReleaseNodesResponse(
            tail=conversion.tail_message(tail), advised_nodes=self._pool.advised_nodes(key)
        )

    async def ListNodes(
        self, request: pb.ListNodesRequest, context: Context
    ) -> pb.ListNodesResponse:
        nodes = sorted(self._pool.state.nodes.values(), key=_node_id)
        if request.run_id:
            nodes = [node.seen_by(request.run_id) for node in nodes if request.run_id in node.runs]
        page, token = page_of(nodes, _node_id, request.page_size, request.page_token)
        return pb.ListNodesResponse(
            nodes=[self._message(node) for node in page], next_page_token=token
        )

    async def WatchAllocations(
        self, request: pb.WatchAllocationsRequest, context: Context
    ) -> AsyncIterator[pb.WatchAllocationsResponse]:
        after = request.after_sequence
        if after < 0:
            raise invalid_argument("after_sequence", after, "it must not be negative")
        while events := await self._pool.next_events(after):
            after = events[-1].sequence
            events_of_run = [
                conversion.event_message(event)
                for event in events
                if event.concerns(request.run_id)
            ]
            if events_of_run:
                yield pb.WatchAllocationsResponse(events=events_of_run)

    async def PlanAssignments(
        self, request: pb.PlanAssignmentsRequest, context: Context
    ) -> pb.PlanAssignmentsResponse:
        tx = self._pool.transaction()
        for entry in request.requests:
            tx.request(conversion.gang_record(entry))
        plan = tx.replan("dry run")
        before = self._pool.state.nodes
        changed = [
            self._message(node)
            for node_id, node in sorted(tx.state.nodes.items())
            if node.assignment != before[node_id].assignment
        ]
        unplaced = [
            pb.UnplacedGang(run_id=run_id, gang_id=gang_id, cause=cause)
            for (run_id, gang_id), cause in plan.waiting.items()
        ]
        return pb.PlanAssignmentsResponse(nodes=changed, unplaced_gangs=unplaced)

    async def DrainNode(
        self, request: pb.DrainNodeRequest, context: Context
    ) -> pb.DrainNodeResponse:
        await self._pool.change(lambda tx: tx.drain(request.node_id, request.drain))
        return pb.DrainNodeResponse(node=self._message(self._pool.state.nodes[request.node_id]))

    async def SetRunPolicy(
        self, request: pb.SetRunPolicyRequest, context: Context
    ) -> pb.SetRunPolicyResponse:
        policy = conversion.run_policy_record(request)
        await self._pool.change(lambda tx: tx.set_run_policy(request.run_id, policy))
        return pb.SetRunPolicyResponse()

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        runs = conversion.run_messages(self._pool.state)
        page, token = page_of(runs, _run_id, request.page_size, request.page_token)
        return pb.ListRunsResponse(runs=page, next_page_token=token)

    async def PlanSplit(
        self, request: pb.PlanSplitRequest, context: Context
    ) -> pb.PlanSplitResponse:
        return split_message(request)

    def _message(self, node: Node) -> pb.Node:
        return conversion.node_message(node, self._pool.heartbeat_time(node.node_id))


def _node_id(node: Node) -> str:
    return node.node_id


def _run_id(run: pb.Run) -> str:
    return run.run_id


MAX_PAGE = 1000
"""Entries of the largest page, and of one whose size is not given."""

T = TypeVar("T")


def page_of(
    entries: Sequence[T], name: Callable[[T], str], page_size: int, page_token: str
) -> tuple[Sequence[T], str]:
    """The entries after the one called `page_token`, and the token of the next page.

    Raises:
        ServiceError: INVALID_ARGUMENT, a negative size.
    """
    if page_size < 0:
        raise invalid_argument("page_size", page_size, f"0 (default) to {MAX_PAGE}")
    size = min(page_size or MAX_PAGE, MAX_PAGE)
    left = [entry for entry in entries if name(entry) > page_token]
    page = left[:size]
    return page, name(page[-1]) if len(left) > size else ""
