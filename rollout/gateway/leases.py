"""Leased tasks for agents: the gateway leases, starts the rollouts and hands out credentials."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration
from seamflow import trace_context
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway import credentials
from services.chassis.errors import Reason, ServiceError, exhausted, failed_precondition
from services.chassis.rpc import tracing
from services.chassis.rpc.clients import call_until_answered

if TYPE_CHECKING:
    from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceAsyncStub

    from rollout.gateway.record.recorder import TurnOpener

_GROUP_WAIT = Duration(seconds=10)
_GROUP_RETRY_SECONDS = 0.5
_ENDED = (Reason.LEASE_EXPIRED, Reason.ROLLOUT_FINISHED)


class Leases:
    def __init__(self, tasks: TaskServiceAsyncStub, opener: TurnOpener, secret: bytes) -> None:
        """`secret` is the key that credentials are derived from; gateways of a run share it."""
        self._tasks = tasks
        self._opener = opener
        self._secret = secret

    async def lease(self, request: pb.LeaseRolloutsRequest) -> pb.LeaseRolloutsResponse:
        """Lease tasks and start a rollout for each; long poll.

        Raises:
            ServiceError: the trajectory manager's error.
        """
        lease = task_pb.LeaseTasksRequest(
            run_id=request.run_id,
            request_id=request.request_id,
            agent_id=request.agent_id,
            purpose=request.purpose,
            wait=request.wait,
            max_leases=request.max_rollouts,
        )
        answer = await call_until_answered(lambda: self._tasks.LeaseTasks(lease))
        started = await asyncio.gather(
            *(self._start_leased(request.run_id, each) for each in answer.leases)
        )
        return pb.LeaseRolloutsResponse(
            leases=[each for each in started if each is not None],
            empty_reason=answer.empty_reason,
        )

    async def start(self, request: pb.StartRolloutRequest) -> pb.StartRolloutResponse:
        """Start a rollout without a leased task.

        Raises:
            ServiceError: the trajectory manager's error; RESOURCE_EXHAUSTED, admission is closed.
        """
        if not request.HasField("group"):
            credential = await self._start(request)
            return pb.StartRolloutResponse(rollout_id=request.rollout_id, credential=credential)
        lease = await self._lease_group_member(request)
        credential = await self._start(request, lease.rollout_id, lease.lease_token)
        return pb.StartRolloutResponse(
            rollout_id=lease.rollout_id,
            credential=credential,
            lease_duration=lease.lease_duration,
        )

    async def extend(self, request: pb.ExtendRolloutsRequest) -> pb.ExtendRolloutsResponse:
        """Extend leases.

        Raises:
            ServiceError: the trajectory manager's error.
        """
        tokens = {credentials.lease_token(r.credential): r.rollout_id for r in request.rollouts}
        unleased = tokens.pop("", None)
        extend = task_pb.ExtendTasksRequest(
            run_id=request.run_id, lease_tokens=tokens, rollout_ids=tokens.values()
        )
        answer = await call_until_answered(lambda: self._tasks.ExtendTasks(extend))
        lost = [tokens[token] for token in answer.lost_lease_tokens]
        return pb.ExtendRolloutsResponse(
            lost_rollout_ids=lost if unleased is None else [*lost, unleased],
            lease_duration=answer.lease_duration,
        )

    async def _start_leased(self, run_id: str, lease: task_pb.TaskLease) -> pb.RolloutLease | None:
        """Start the rollout of a lease; None: the lease has ended meanwhile."""
        request = pb.StartRolloutRequest(run_id=run_id, purpose=lease.task.purpose)
        if lease.task.HasField("pinned_weight_version"):
            request.pinned_weight_version = lease.task.pinned_weight_version
        try:
            credential = await self._start(request, lease.rollout_id, lease.lease_token)
        except ServiceError as error:
            if error.reason in _ENDED:
                return None
            raise
        return pb.RolloutLease(
            task=lease.task,
            rollout_id=lease.rollout_id,
            credential=credential,
            lease_duration=lease.lease_duration,
        )

    async def _start(
        self, request: pb.StartRolloutRequest, rollout_id: str = "", lease_token: str = ""
    ) -> str:
        """Start a rollout; returns its credential."""
        name = rollout_id or request.rollout_id
        credential = credentials.derive(self._secret, request.run_id, name, lease_token)
        new = store_pb.NewRollout(
            run_id=request.run_id,
            rollout_id=name,
            lease_token=lease_token,
            purpose=request.purpose,
            credential_digest=credentials.digest(credential),
            traceparent=trace_context.of_rollout(request.run_id, name),
            labels=request.labels,
        )
        if request.HasField("pinned_weight_version"):
            new.pinned_weight_version = request.pinned_weight_version
        cause = tracing.traceparent()
        with tracing.span(
            "rollout",
            root=new.traceparent,
            links=[cause] if cause else (),
            run_id=new.run_id,
            rollout_id=name,
        ):
            await self._opener.start(new)
        return credential

    async def _lease_group_member(self, request: pb.StartRolloutRequest) -> task_pb.TaskLease:
        group = request.group
        task = trajectory_pb2.Task(
            task_id=group.group_id,
            num_samples=group.size,
            purpose=tokens_pb2.PURPOSE_TRAIN,
        )
        lease = task_pb.LeaseTasksRequest(
            run_id=request.run_id,
            request_id=_request_id((group.group_id, request.rollout_id)),
            wait=_GROUP_WAIT,
            task=task,
        )
        answer = await call_until_answered(lambda: self._tasks.LeaseTasks(lease))
        if answer.leases:
            return answer.leases[0]
        if answer.empty_reason == trajectory_pb2.EMPTY_REASON_RUN_ENDED:
            raise failed_precondition(Reason.RUN_ENDED, f"run {request.run_id!r} has ended")
        message = f"admission is closed for group {group.group_id!r}: retry"
        raise exhausted(Reason.TOO_MANY_REQUESTS, message, _GROUP_RETRY_SECONDS)


def _request_id(names: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:32]
