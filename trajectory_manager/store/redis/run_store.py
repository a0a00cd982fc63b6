"""The rules and state of each run: every change is one Lua script on the keys of one run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

from redis.asyncio import Redis
from seamflow.trajectory.v1.sample_service_pb2 import Readiness
from seamflow.trajectory.v1.task_service_pb2 import SubmitTasksResponse

from services.chassis.redis.connect import store_errors
from services.chassis.redis.scripts import Scripts
from trajectory_manager.model.records import (
    MAX_DEAD_LETTERS,
    MAX_REPLACEMENTS,
    DeadLetter,
    DeadLetterReason,
    Effect,
    EmptyReason,
    LostLease,
    Purpose,
    RolloutResult,
    SettleResult,
    Task,
    TaskContext,
    TaskLease,
    Topic,
)
from trajectory_manager.model.runs import Run, RunConfig
from trajectory_manager.store.errors import store_error
from trajectory_manager.store.redis import keys, record_json
from trajectory_manager.store.redis.inspection_store import packed
from trajectory_manager.store.redis.run_scripts import RunScripts

_CONFIG_SECONDS = 5.0
_SCAN = 1000
_COUNTS = [field.name for field in Readiness.DESCRIPTOR.fields]
"""What run_counts.lua returns, in this order."""


class RunStore(RunScripts):
    """Tasks, groups, leases and admission of each run; NOT_FOUND for one not created."""

    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        # redis-py's types do not express that replies are bytes.
        self._redis: Any = redis
        super().__init__(scripts)
        # By run its rules and when they were read, in monotonic seconds.
        self._configs: dict[str, tuple[float, RunConfig]] = {}

    async def create_run(self, run_id: str, config: RunConfig) -> RunConfig | None:
        """Create the run; None if it was created, else the existing config."""
        # Listed first: a run that exists and is not listed would never be swept.
        await self._scripts.call("register_run", keys=[keys.RUNS], args=[run_id])
        self._configs.pop(run_id, None)
        existing = await self._call("create_run", run_id, json.dumps(asdict(config)))
        return record_json.decode(RunConfig, existing[0]) if existing else None

    async def run_ids(self) -> list[str]:
        with store_errors("run_ids"):
            return sorted(name.decode() for name in await self._redis.smembers(keys.RUNS))

    async def config(self, run_id: str) -> RunConfig:
        read_at, config = self._configs.get(run_id, (-math.inf, None))
        if config is None or time.monotonic() - read_at > _CONFIG_SECONDS:
            (text,) = await self._scripts.read([("GET", keys.run_keys(run_id)[0])])
            if text is None:
                self._configs.pop(run_id, None)
                raise store_error("UNKNOWN_RUN", run_id)
            config = record_json.decode(RunConfig, text)
            self._configs[run_id] = (time.monotonic(), config)
        return config

    async def run(self, run_id: str) -> Run:
        config, counters = keys.run_keys(run_id)[:2]
        read = ("HMGET", counters, "created", "ended", "committed_step")
        text, values = await self._scripts.read([("GET", config), read])
        if text is None:
            raise store_error("UNKNOWN_RUN", run_id)
        created, ended, committed_step = (float(value or 0) for value in values)
        return Run(
            run_id=run_id,
            config=record_json.decode(RunConfig, text),
            create_time=created,
            end_time=ended,
            committed_step=int(committed_step),
        )

    async def end_run(self, run_id: str) -> None:
        """End the run: no task is leased until a trainer reconciles. Idempotent."""
        await self._call("end_run", run_id)

    async def delete_run(self, run_id: str) -> int:
        """Delete an ended run and everything of it; return how many rollouts this call deleted.

        Many atomic steps: a call that follows an interrupted one completes it. Until then the run
        does not exist for other calls and cannot be created.

        Raises:
            ServiceError: WRONG_STATE, the run has not ended.
        """
        await self._call("begin_deletion", run_id)
        self._configs.pop(run_id, None)
        # Before its keys, so that no run that is created next loses its registration.
        await self._scripts.call("unregister_run", keys=[keys.RUNS], args=[run_id])
        num_rollouts = 0
        async for found in self._rollout_keys(run_id):
            await self._scripts.read([("UNLINK", key) for key in found])
            num_rollouts += sum(map(keys.is_header, found))
        await self._call("end_deletion", run_id)
        return num_rollouts

    async def _rollout_keys(self, run_id: str) -> AsyncIterator[list[str]]:
        """All keys of the run's rollouts, registered or not, in batches."""
        own, batch = set(keys.run_keys(run_id)), list[str]()
        with store_errors("delete_run"):
            async for found in self._redis.scan_iter(match=keys.all_of_run(run_id), count=_SCAN):
                if (key := found.decode()) not in own:
                    batch.append(key)
                if len(batch) == _SCAN:
                    yield batch
                    batch = []
        yield batch

    async def version(self, run_id: str, topic: Topic) -> int:
        """A number that changes whenever a long poll of `topic` must attempt again."""
        await self.config(run_id)
        with store_errors("version"):
            value = await self._redis.hget(keys.run_keys(run_id)[1], f"version:{topic.value}")
        return int(value or 0)

    async def submit(
        self, run_id: str, tasks: Sequence[Task], max_queued: int
    ) -> SubmitTasksResponse:
        """Queue all tasks that are new, or none.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED, ALREADY_EXISTS (same task_id, other task).
        """
        entries = [
            part
            for task in tasks
            for part in (task.task_id, int(task.purpose), record_json.encode(task))
        ]
        accepted_tasks, free = await self._call("submit_tasks", run_id, max_queued, *entries)
        return SubmitTasksResponse(num_accepted=accepted_tasks, num_free=free)

    async def lease_task(
        self, run_id: str, purposes: Sequence[Purpose], nonce: str
    ) -> TaskLease | EmptyReason:
        """Lease one open slot, admitting a group if none is open; earlier purposes first.

        A call with the nonce of a lease that is held gets that lease, renewed.
        Admission: admitted - discarded - leased to a step <= `RunConfig.max_outstanding_groups`.
        The position of a group determines its required weight version: `TaskContext`.
        Beyond max_stored_tokens no TRAIN group is admitted, except those of the next step if its
        commit lets retention free tokens.
        A TRAIN group has num_samples + num_extra_samples slots.
        """
        asked = (int(purpose) for purpose in purposes)
        return _task_lease(nonce, await self._call("lease_task", run_id, nonce, *asked))

    async def lease_own_task(self, run_id: str, task: Task, nonce: str) -> TaskLease | EmptyReason:
        """Lease one open slot of `task`, an agent's own; a new one is admitted, never queued.

        Its slots are leased by this method only. Nonces and admission are as in `lease_task`.

        Raises:
            ServiceError: GROUP_FULL (no slot is open, or the group has left), ALREADY_EXISTS
                (same task_id, other task).
        """
        text = record_json.encode(task)
        return _task_lease(
            nonce, await self._call("lease_own_task", run_id, nonce, task.task_id, text)
        )

    async def admit_recorded(self, run_id: str, tasks: Sequence[Task]) -> SubmitTasksResponse:
        """Admit groups whose rollouts, each the first attempt of its slot, are recorded; or none.

        The slots are leased until they are settled; `num_free` is how many more are admissible.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED, ALREADY_EXISTS (same task_id, other task).
        """
        entries = [part for task in tasks for part in (task.task_id, record_json.encode(task))]
        new, free = await self._call("admit_recorded", run_id, *entries)
        return SubmitTasksResponse(num_accepted=new, num_free=free)

    async def extend_tasks(self, run_id: str, leases: Sequence[tuple[str, str]]) -> list[bool]:
        """Extend each lease (rollout_id, nonce); False for those that are gone."""
        flat = [part for lease in leases for part in lease]
        (held,) = await self._call("extend_tasks", run_id, *flat)
        return [flag == 1 for flag in held]

    async def register_rollout(
        self, run_id: str, rollout_id: str, nonce: str | None
    ) -> TaskContext | None:
        """Add the rollout to its run; with a nonce, check its lease and return its task context.

        Raises:
            ServiceError: LEASE_EXPIRED.
        """
        purpose, required_weight_version = await self._call(
            "register_rollout", run_id, rollout_id, int(nonce is not None), nonce or ""
        )
        return TaskContext(Purpose(int(purpose)), int(required_weight_version)) if purpose else None

    async def listed(self, run_id: str, start: int, limit: int) -> list[str]:
        """Rollouts in the order they were registered, from position `start`."""
        await self.config(run_id)
        with store_errors("rollouts"):
            names = await self._redis.zrange(_key(run_id, "rollouts"), start, start + limit - 1)
        return [name.decode() for name in names]

    async def add_outbox_marks(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Mark rollouts that are about to finish and must be settled. Idempotent."""
        await self._call("add_outbox_marks", run_id, *rollout_ids)

    async def remove_outbox_marks(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Remove the marks of rollouts that did not finish. Idempotent."""
        await self._call("remove_outbox_marks", run_id, *rollout_ids)

    async def unsettled(self, run_id: str, limit: int) -> list[str]:
        """Rollouts with an outbox mark, oldest first."""
        await self.config(run_id)
        with store_errors("unsettled"):
            names = await self._redis.zrange(_key(run_id, "outbox"), 0, limit - 1)
        return [name.decode() for name in names]

    async def expired(self, run_id: str, limit: int) -> list[LostLease]:
        """Leases that expired or that their group ended, of rollouts that are not settled."""
        over, renewed, ended = await self._call("list_ended_leases", run_id, limit)
        return [
            LostLease(
                rollout_id=name.decode(),
                surplus=float(score) == 0,
                idle_seconds=(float(renewed) - float(score)) / 1000,
                run_ended=bool(ended),
            )
            for name, score in zip(over[::2], over[1::2], strict=True)
        ]

    async def settle(self, run_id: str, results: Sequence[RolloutResult]) -> list[SettleResult]:
        """Apply finished rollouts to their groups, in order; remove marks and leases. Idempotent.

        A failed sample opens its slot again outside admission. A group is complete with its first
        num_samples: the leases of its other slots end and their rollouts do not count. A complete
        group passes the zero-variance filter and becomes ready. A discarded one frees its capacity
        and is a dead letter.
        """
        args = [
            part
            for result in results
            for part in (result.rollout_id, _result_text(result), _row(result))
        ]
        (settled,) = await self._call(
            "settle_rollouts", run_id, MAX_REPLACEMENTS, MAX_DEAD_LETTERS, *args
        )
        return [
            SettleResult(
                effect=Effect(effect.decode()),
                reason=DeadLetterReason(reason[0]).name.lower() if reason else "",
            )
            for effect, *reason in settled
        ]

    async def dead_letters(
        self, run_id: str, start: int, limit: int, *, newest_first: bool = False
    ) -> list[DeadLetter]:
        """Groups that were discarded from position `start`, oldest first unless asked otherwise."""
        page = await self._call("list_dead_letters", run_id, start, limit, int(newest_first))
        return [
            _dead_letter(task, letter) for task, letter in zip(page[::2], page[1::2], strict=True)
        ]

    async def task(self, run_id: str, task_id: str) -> Task | None:
        """A task that was ever submitted."""
        (found,) = await self._scripts.read([("HGET", _key(run_id, "tasks"), task_id)])
        return None if found is None else record_json.decode(Task, found)

    async def requeue(self, run_id: str, task_ids: Sequence[str]) -> int:
        """Queue the tasks of dead letters again and remove the letters; return how many.

        An agent's own tasks are skipped: they are never queued.
        """
        (number,) = await self._call("requeue_dead_letters", run_id, *task_ids)
        return int(number)

    async def cancel(self, run_id: str, task_ids: Sequence[str]) -> int:
        """Take back EVAL tasks that are not complete and end their leases; return how many."""
        (number,) = await self._call("cancel_tasks", run_id, *task_ids)
        return int(number)

    async def add_stored_tokens(self, run_id: str, delta: int) -> None:
        """Add `delta` to the count of stored tokens; negative after a deletion."""
        await self._call("add_stored_tokens", run_id, delta)

    async def run_counts(self, run_id: str) -> Readiness:
        *counts, failure = await self._call("run_counts", run_id)
        values = *counts, failure.decode()
        return Readiness(**dict(zip(_COUNTS, values, strict=True)))


def _key(run_id: str, part: str) -> str:
    return keys.run_keys(run_id)[keys.RUN_PARTS.index(part)]


def _result_text(result: RolloutResult) -> str:
    return json.dumps(
        {
            "finished": result.finished,
            "reward": "" if result.reward is None else _text(result.reward),
            "rewards": {name: _text(value) for name, value in result.rewards},
            "min_version": result.min_weight_version,
            "samples": result.sample_ids,
            "message": result.failure_message,
            "cancelled": result.cancelled,
        }
    )


def _row(result: RolloutResult) -> bytes:
    return b"" if result.summary is None else packed(result.summary)


def _text(number: float) -> str:
    # Adding zero makes -0.0 and 0.0 the same text.
    return repr(number + 0.0)


def _task_lease(nonce: str, reply: list[Any]) -> TaskLease | EmptyReason:
    if isinstance(reply[0], int):
        return EmptyReason(reply[0])
    rollout_id, task, seconds = reply
    return TaskLease(
        task=record_json.decode(Task, task),
        rollout_id=rollout_id.decode(),
        nonce=nonce,
        seconds=float(seconds),
    )


def _dead_letter(task: bytes, text: bytes) -> DeadLetter:
    fields = json.loads(text)
    return DeadLetter(
        task=record_json.decode(Task, task),
        reason=DeadLetterReason(fields["reason"]),
        message=fields["message"],
        time=fields["time"],
        attempts=tuple(fields["attempts"]),
    )
