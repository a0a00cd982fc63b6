"""`SchedulerService`: what each call means in terms of the pool."""
# ruff: noqa: N802 -- rpcs are named by the contract

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from seamflow.durations import to_duration
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceServicer

from scheduler.api import conversion
from scheduler.api.plan_split import split_message
from scheduler.model.records import Node
from scheduler.pool.pool import Pool, assignment_differs, gang_granted
from services.chassis import metrics
from services.chassis.errors import invalid_argument, not_found

__all__ = ["SchedulerServicer"]

Context = grpc.aio.ServicerContext[Any, Any]

_REQUEST_WAIT_SECONDS = 60.0


class SchedulerServicer(SchedulerServiceServicer):
    """Translates; the rules are in `draft.py` and `policy.py`.

    Args:
        pool: the nodes.
        lease_seconds: lease that node agents are told.
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
        """Let a node join or come back, under a new epoch."""
        node = await self._pool.register(conversion.node_record(request))
        return pb.RegisterNodeResponse(
            assignment=conversion.assignment_message(node.assignment),
            lease_duration=to_duration(self._lease_seconds),
        )

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        """Take the report; answer when there is something new to do, or when time is up."""
        seconds = conversion.wait_seconds(request.wait, self._lease_seconds / 2)
        state = conversion.state_record(request.state)
        switch_seconds = conversion.switch_seconds(request)
        is_news = await self._pool.heartbeat(
            request.node_id,
            state,
            request.reported_epoch,
            request.known_epoch,
            switch_seconds=switch_seconds,
            report=conversion.report_record(request),
        )
        node = self._pool.state.nodes[request.node_id]
        # A report of an assignment before the present one says nothing of where it led.
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
        """Let a gang ask; answer when all of its nodes are at work, or when time is up."""
        gang = conversion.gang_record(request)
        seconds = conversion.wait_seconds(request.wait, _REQUEST_WAIT_SECONDS)
        await self._pool.change(lambda draft: draft.request(gang))
        state = await self._pool.until(gang_granted(gang.key), seconds)
        return pb.RequestNodesResponse(
            granted=gang.key in state.gangs and state.granted(gang),
            nodes=[self._message(node) for node in state.members(gang)],
        )

    async def ReleaseNodes(
        self, request: pb.ReleaseNodesRequest, context: Context
    ) -> pb.ReleaseNodesResponse:
        """Let a gang give its nodes back."""
        key = (request.run_id, request.gang_id)
        outlook, batch = conversion.outlook_record(request), conversion.batch_number(request)
        await self._pool.change(lambda draft: draft.release(key, outlook, batch))
        return pb.ReleaseNodesResponse()

    async def ListNodes(
        self, request: pb.ListNodesRequest, context: Context
    ) -> pb.ListNodesResponse:
        """The nodes that serve a job, with its workers alone; or all nodes, whole."""
        nodes = sorted(self._pool.state.nodes.values(), key=lambda node: node.node_id)
        if request.run_id:
            nodes = [node.seen_by(request.run_id) for node in nodes if request.run_id in node.runs]
        return pb.ListNodesResponse(nodes=[self._message(node) for node in nodes])

    async def WatchAllocations(
        self, request: pb.WatchAllocationsRequest, context: Context
    ) -> AsyncIterator[pb.WatchAllocationsResponse]:
        """The audit log from anywhere on, then what is added to it."""
        after = request.after_sequence
        if after < 0:
            raise invalid_argument("after_sequence", after, "it must not be negative")
        while events := await self._pool.next_events(after):
            after = events[-1].sequence
            told = [
                conversion.event_message(event)
                for event in events
                if event.concerns(request.run_id)
            ]
            if told:
                yield pb.WatchAllocationsResponse(events=told)

    async def PlanAssignments(
        self, request: pb.PlanAssignmentsRequest, context: Context
    ) -> pb.PlanAssignmentsResponse:
        """Try the requests on a copy that is thrown away."""
        draft = self._pool.draft()
        for entry in request.requests:
            draft.request(conversion.gang_record(entry))
        plan = draft.replan("dry run")
        before = self._pool.state.nodes
        changed = [
            self._message(node)
            for node_id, node in sorted(draft.state.nodes.items())
            if node.assignment != before[node_id].assignment
        ]
        unplaced = [
            pb.UnplacedGang(run_id=run_id, gang_id=gang_id, cause=cause)
            for (run_id, gang_id), cause in plan.waiting.items()
        ]
        return pb.PlanAssignmentsResponse(
            nodes=changed,
            unplaced_gang_ids=[gang.gang_id for gang in unplaced],
            unplaced_gangs=unplaced,
        )

    async def DrainNode(
        self, request: pb.DrainNodeRequest, context: Context
    ) -> pb.DrainNodeResponse:
        """Give a node no more work, or work again."""
        await self._pool.change(lambda draft: draft.drain(request.node_id, request.drain))
        return pb.DrainNodeResponse(node=self._message(self._pool.state.nodes[request.node_id]))

    async def SetRunPolicy(
        self, request: pb.SetRunPolicyRequest, context: Context
    ) -> pb.SetRunPolicyResponse:
        """Give a job its place among the others."""
        policy = conversion.run_policy_record(request)
        await self._pool.change(lambda draft: draft.set_run_policy(request.run_id, policy))
        return pb.SetRunPolicyResponse()

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        """Every job that has nodes, gangs or a policy."""
        return pb.ListRunsResponse(runs=conversion.run_messages(self._pool.state))

    async def PlanSplit(
        self, request: pb.PlanSplitRequest, context: Context
    ) -> pb.PlanSplitResponse:
        """Split nodes between generation and training, on paper."""
        return split_message(request)

    def _message(self, node: Node) -> pb.Node:
        return conversion.node_message(node, self._pool.heartbeat_time(node.node_id))
