# ruff: noqa: N802 -- rpcs are named as the contract names them
"""TaskService: the queue of tasks between the dataloader and agents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc.aio
from seamflow.durations import to_duration
from seamflow.trajectory.v1 import task_service_pb2 as pb
from seamflow.trajectory.v1 import task_service_pb2_grpc as pb_grpc

from services.chassis.errors import ServiceError, invalid_argument, permission_denied
from services.chassis.log import get_logger
from trajectory_manager.api import conversion, lease_token, validation
from trajectory_manager.model.records import EmptyReason, Purpose, Task, TaskLease, Topic
from trajectory_manager.model.runs import RunConfig
from trajectory_manager.service import metrics
from trajectory_manager.service.long_poll import LongPoll
from trajectory_manager.service.rollouts import Rollouts
from trajectory_manager.store.redis.connect import Store

_MAX_REQUEUED = 1000
# Fewer than MAX_REPLACEMENTS: a lost response loses all its leases.
_MAX_LEASES = 8
_MAX_EXTENDED = 1024
_EVAL_FIRST = (Purpose.EVAL, Purpose.TRAIN)
_OWN_QUEUE = "own"

_Answer = TaskLease | EmptyReason
_Lease = Callable[[], Awaitable[_Answer]]


class TaskServicer(pb_grpc.TaskServiceServicer):
    def __init__(
        self,
        store: Store,
        rollouts: Rollouts,
        waiting: LongPoll,
        max_queued_tasks: int,
    ) -> None:
        """`max_queued_tasks` bounds the queue of a run, for each purpose."""
        self._store = store
        self._rollouts = rollouts
        self._waiting = waiting
        self._max_queued_tasks = max_queued_tasks
        # By run and queue: why the newest attempt found nothing.
        self._reasons: dict[tuple[str, str], _Answer] = {}

    async def SubmitTasks(
        self, request: pb.SubmitTasksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SubmitTasksResponse:
        run_id = validation.run_name(request.run_id)
        config = await self._store.runs.config(run_id)
        tasks = [
            conversion.task_from(f"tasks[{index}]", task, config)
            for index, task in enumerate(request.tasks)
        ]
        return await self._store.runs.submit(run_id, tasks, self._max_queued_tasks)

    async def LeaseTasks(
        self, request: pb.LeaseTasksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.LeaseTasksResponse:
        run_id = validation.run_name(request.run_id)
        validation.name("request_id", request.request_id)
        agent_id = validation.optional_name("agent_id", request.agent_id)
        wait = validation.seconds("wait", request.wait)
        if request.HasField("task"):
            leases, reason = await self._own(run_id, request, wait)
        else:
            leases, reason = await self._queued(run_id, request, wait)
        metrics.LEASES.labels("leased").inc(len(leases))
        names = [lease.rollout_id for lease in leases]
        log = get_logger()
        log.debug("tasks_leased", run_id=run_id, rollout_ids=names, agent_id=agent_id)
        return pb.LeaseTasksResponse(
            leases=map(_lease_to, leases),
            empty_reason=reason,  # type: ignore[arg-type]
        )

    async def _own(
        self, run_id: str, request: pb.LeaseTasksRequest, wait: float
    ) -> tuple[list[TaskLease], int]:
        """One rollout of the agent's own task."""
        task = _own_task(request, await self._store.runs.config(run_id))
        nonce = lease_token.nonce(request.request_id)

        async def lease() -> TaskLease | EmptyReason:
            return await self._store.runs.lease_own_task(run_id, task, nonce)

        return _split([await self._first(run_id, _OWN_QUEUE, wait, lease)])

    async def _queued(
        self, run_id: str, request: pb.LeaseTasksRequest, wait: float
    ) -> tuple[list[TaskLease], int]:
        """The first rollout of the queue as soon as there is one, and more that are there then."""
        purposes: Sequence[Purpose] = _EVAL_FIRST
        if request.purpose:
            purposes = (conversion.purpose_from("purpose", request.purpose),)
        most = validation.bounded("max_leases", request.max_leases, _MAX_LEASES) or 1
        nonces = [lease_token.nonce(request.request_id, index) for index in range(most)]

        async def lease() -> TaskLease | EmptyReason:
            return await self._store.runs.lease_task(run_id, purposes, nonces[0])

        queue = " ".join(purpose.name for purpose in purposes)
        first = await self._first(run_id, queue, wait, lease)
        if not isinstance(first, TaskLease):
            return _split([first])
        return _split([first, *await self._lease_more(run_id, purposes, nonces[1:])])

    async def _first(self, run_id: str, queue: str, wait: float, lease: _Lease) -> _Answer:
        """The answer of `lease` once it is a lease or final; after `wait` why there is none."""

        async def attempt() -> _Answer | None:
            answer = await lease()
            if _is_waiting(answer) and await self._rollouts.sweep(run_id):
                answer = await lease()
            if not _is_waiting(answer):
                return answer
            # For calls that time out without an attempt of their own.
            self._reasons[run_id, queue] = answer
            return None

        # At once and out of turn: the call may be a repeated one that holds a lease.
        answer = await lease()
        if not _is_waiting(answer):
            return answer
        self._reasons[run_id, queue] = answer
        found: _Answer | None = await self._waiting.until(run_id, Topic.TASKS, wait, attempt, queue)
        return self._reasons[run_id, queue] if found is None else found

    async def _lease_more(
        self, run_id: str, purposes: Sequence[Purpose], nonces: Sequence[str]
    ) -> list[_Answer]:
        """Further leases, without waiting; errors only end the list."""
        tries = (self._store.runs.lease_task(run_id, purposes, nonce) for nonce in nonces)
        # Concurrently, in one round trip: attempts that find nothing are cheap.
        answers = await asyncio.gather(*tries, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, ServiceError):
                get_logger().error("lease_failed", run_id=run_id, exc_info=answer)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def ExtendTasks(
        self, request: pb.ExtendTasksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExtendTasksResponse:
        run_id = validation.run_name(request.run_id)
        validation.bounded("lease_tokens", len(request.lease_tokens), _MAX_EXTENDED)
        config = await self._store.runs.config(run_id)
        leases = [lease_token.parse(token) for token in request.lease_tokens]
        for (leased, _), named in zip(leases, request.rollout_ids, strict=False):
            if leased != named:
                raise permission_denied(f"not the credential of rollout {named!r}")
        held = await self._store.runs.extend_tasks(run_id, leases)
        lost = [token for token, ok in zip(request.lease_tokens, held, strict=True) if not ok]
        metrics.LEASES.labels("extended").inc(len(held) - len(lost))
        metrics.LEASES.labels("lost").inc(len(lost))
        return pb.ExtendTasksResponse(
            lost_lease_tokens=lost, lease_duration=to_duration(config.lease_seconds)
        )

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListDeadLettersResponse:
        run_id = validation.run_name(request.run_id)
        start, limit = validation.page(request.page_size, request.page_token)
        letters = await self._store.runs.dead_letters(
            run_id, start, limit + 1, newest_first=request.newest_first
        )
        return pb.ListDeadLettersResponse(
            dead_letters=[conversion.dead_letter_to(letter) for letter in letters[:limit]],
            next_page_token=str(start + limit) if len(letters) > limit else "",
        )

    async def RequeueDeadLetters(
        self, request: pb.RequeueDeadLettersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RequeueDeadLettersResponse:
        run_id = validation.run_name(request.run_id)
        validation.bounded("task_ids", len(request.task_ids), _MAX_REQUEUED)
        task_ids = [validation.name("task_ids", task_id) for task_id in request.task_ids]
        number = await self._store.runs.requeue(run_id, task_ids)
        metrics.REQUEUED.inc(number)
        return pb.RequeueDeadLettersResponse(num_requeued=number)

    async def CancelTasks(
        self, request: pb.CancelTasksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CancelTasksResponse:
        run_id = validation.run_name(request.run_id)
        validation.bounded("task_ids", len(request.task_ids), _MAX_REQUEUED)
        task_ids = [validation.name("task_ids", task_id) for task_id in request.task_ids]
        number = await self._store.runs.cancel(run_id, task_ids)
        get_logger().info("tasks_cancelled", run_id=run_id, num_cancelled=number)
        return pb.CancelTasksResponse(num_cancelled=number)


def _own_task(request: pb.LeaseTasksRequest, config: RunConfig) -> Task:
    for field in ("purpose", "max_leases"):
        if value := getattr(request, field):
            raise invalid_argument(field, value, "absent with `task`")
    if request.task.purpose != int(Purpose.TRAIN):
        raise invalid_argument("task.purpose", request.task.purpose, "TRAIN")
    return conversion.task_from("task", request.task, config, own=True)


def _is_waiting(answer: _Answer) -> bool:
    """Whether there is nothing to lease now, and a later attempt may find something."""
    return isinstance(answer, EmptyReason) and answer is not EmptyReason.RUN_ENDED


def _split(answers: Sequence[_Answer]) -> tuple[list[TaskLease], int]:
    """The leases among the answers; without any, why."""
    leases = [answer for answer in answers if isinstance(answer, TaskLease)]
    reasons = [answer for answer in answers if isinstance(answer, EmptyReason)]
    return leases, 0 if leases else int(reasons[0])


def _lease_to(lease: TaskLease) -> pb.TaskLease:
    return pb.TaskLease(
        task=conversion.task_to(lease.task),
        rollout_id=lease.rollout_id,
        lease_token=lease_token.task_token(lease.rollout_id, lease.nonce),
        lease_duration=to_duration(lease.seconds),
    )
