# ruff: noqa: N802 -- rpcs are named as the contract names them
"""TaskService: the queue of tasks between the dataloader and agents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from seamflow.trajectory.v1 import task_service_pb2 as pb
from seamflow.trajectory.v1 import task_service_pb2_grpc as pb_grpc

from services.chassis.errors import Reason, ServiceError
from services.chassis.log import get_logger
from trajectory_manager.api import conversion, lease_token, validation
from trajectory_manager.model.records import Purpose, TaskLease, Topic
from trajectory_manager.service.long_poll import LongPoll
from trajectory_manager.service.metrics import Metrics
from trajectory_manager.service.rollouts import Rollouts
from trajectory_manager.store.interface import Store

_MAX_REQUEUED = 1000
# Fewer than MAX_REPLACEMENTS: a lost response loses all its leases.
_MAX_LEASES = 8
_EVAL_FIRST = (Purpose.EVAL, Purpose.TRAIN)


class TaskServicer(pb_grpc.TaskServiceServicer):
    """Serves the task feed over gRPC."""

    def __init__(
        self,
        store: Store,
        rollouts: Rollouts,
        waiting: LongPoll,
        metrics: Metrics,
        max_queued_tasks: int,
    ) -> None:
        """`max_queued_tasks` bounds the queue of a run, for each purpose."""
        self._store = store
        self._rollouts = rollouts
        self._waiting = waiting
        self._metrics = metrics
        self._max_queued_tasks = max_queued_tasks
        # By run and queue: the error of the newest attempt, if the store was full.
        self._full: dict[tuple[str, str], ServiceError] = {}

    async def SubmitTasks(
        self, request: pb.SubmitTasksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SubmitTasksResponse:
        """Queue tasks that are new, or none."""
        run_id = validation.run_name(request.run_id)
        config = await self._store.runs.config(run_id)
        tasks = [conversion.task_from(task, config) for task in request.tasks]
        submitted = await self._store.runs.submit(run_id, tasks, self._max_queued_tasks)
        return pb.SubmitTasksResponse(
            num_accepted=submitted.num_accepted, num_free=submitted.num_free
        )

    async def LeaseTask(
        self, request: pb.LeaseTaskRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.LeaseTaskResponse:
        """Lease slots of tasks, evaluations first; long poll."""
        run_id = validation.run_name(request.run_id)
        agent_id = validation.optional_name("agent_id", request.agent_id)
        wait = validation.seconds("wait", request.wait)
        most = validation.bounded("max_leases", request.max_leases, _MAX_LEASES)
        purposes: Sequence[Purpose] = _EVAL_FIRST
        if request.purpose:
            purposes = (conversion.purpose_from("purpose", request.purpose),)

        lease = await self._wait_for_lease(run_id, purposes, wait)
        if lease is None:
            return pb.LeaseTaskResponse()
        more = await self._lease_more(run_id, purposes, most - 1)
        names = [each.rollout_id for each in (lease, *more)]
        get_logger().debug("tasks_leased", run_id=run_id, rollout_ids=names, agent_id=agent_id)
        duration = Duration()
        duration.FromMilliseconds(int(lease.seconds * 1000))
        return pb.LeaseTaskResponse(
            **_lease_fields(lease),
            lease_duration=duration,
            more=[pb.TaskLease(**_lease_fields(x)) for x in more],
        )

    async def _wait_for_lease(
        self, run_id: str, purposes: Sequence[Purpose], wait: float
    ) -> TaskLease | None:
        queue = " ".join(purpose.name for purpose in purposes)

        async def attempt() -> TaskLease | None:
            try:
                lease = await self._lease(run_id, purposes)
            except ServiceError as error:
                if error.reason is not Reason.STORE_FULL:
                    raise
                # Retention may free tokens while calls wait; otherwise all of them get this.
                self._full[run_id, queue] = error
                return None
            # After the attempt: a call that times out meanwhile uses the previous outcome.
            self._full.pop((run_id, queue), None)
            return lease

        lease = await self._waiting.until(run_id, Topic.TASKS, wait, attempt, queue)
        if lease is None and (full := self._full.get((run_id, queue))) is not None:
            raise full
        return lease

    async def _lease(self, run_id: str, purposes: Sequence[Purpose]) -> TaskLease | None:
        nonce = lease_token.new_nonce()
        lease = await self._store.runs.lease_task(run_id, purposes, nonce)
        if lease is None and await self._rollouts.sweep(run_id):
            lease = await self._store.runs.lease_task(run_id, purposes, nonce)
        if lease is not None:
            self._metrics.leases("leased")
        return lease

    async def _lease_more(
        self, run_id: str, purposes: Sequence[Purpose], most: int
    ) -> list[TaskLease]:
        """Up to `most` further leases, without waiting; errors only end the list."""
        tries = (
            self._store.runs.lease_task(run_id, purposes, lease_token.new_nonce())
            for _ in range(most)
        )
        # Concurrently, in one round trip: attempts that find nothing are cheap.
        answers = await asyncio.gather(*tries, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, ServiceError):
                get_logger().error("lease_failed", run_id=run_id, exc_info=answer)
        leases = [answer for answer in answers if isinstance(answer, TaskLease)]
        self._metrics.leases("leased", len(leases))
        return leases

    async def ExtendTasks(
        self, request: pb.ExtendTasksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExtendTasksResponse:
        """Extend task leases; the response names those that are lost."""
        run_id = validation.run_name(request.run_id)
        leases = [lease_token.parse(token) for token in request.lease_tokens]
        held = await self._store.runs.extend_tasks(run_id, leases)
        lost = [token for token, ok in zip(request.lease_tokens, held, strict=True) if not ok]
        self._metrics.leases("extended", len(held) - len(lost))
        self._metrics.leases("lost", len(lost))
        return pb.ExtendTasksResponse(lost_lease_tokens=lost)

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListDeadLettersResponse:
        """A page of the dead letters of a run, oldest first."""
        run_id = validation.run_name(request.run_id)
        start, limit = validation.page(request.page_size, request.page_token)
        letters = await self._store.runs.dead_letters(run_id, start, limit + 1)
        return pb.ListDeadLettersResponse(
            dead_letters=[conversion.dead_letter_to(letter) for letter in letters[:limit]],
            next_page_token=str(start + limit) if len(letters) > limit else "",
        )

    async def RequeueDeadLetters(
        self, request: pb.RequeueDeadLettersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RequeueDeadLettersResponse:
        """Queue the tasks of dead letters again."""
        run_id = validation.run_name(request.run_id)
        validation.bounded("task_ids", len(request.task_ids), _MAX_REQUEUED)
        task_ids = [validation.name("task_ids", task_id) for task_id in request.task_ids]
        number = await self._store.runs.requeue(run_id, task_ids)
        self._metrics.requeued(number)
        return pb.RequeueDeadLettersResponse(num_requeued=number)

    async def CompleteTask(
        self, request: pb.CompleteTaskRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CompleteTaskResponse:
        """Give a task lease back; an unfinished rollout fails."""
        run_id = validation.run_name(request.run_id)
        await self._rollouts.complete(run_id, *lease_token.parse(request.lease_token))
        self._metrics.leases("completed")
        return pb.CompleteTaskResponse()


def _lease_fields(lease: TaskLease) -> dict[str, Any]:
    """The fields of a lease in the response."""
    return {
        "task": conversion.task_to(lease.task),
        "rollout_id": lease.rollout_id,
        "lease_token": lease_token.task_token(lease.rollout_id, lease.nonce),
    }
