"""RunStore on Redis: every change is one Lua script on the keys of one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from redis.asyncio import Redis

from services.chassis.redis.connect import store_errors
from services.chassis.redis.scripts import Scripts
from trajectory_manager.model.records import (
    DeadLetter,
    DeadLetterReason,
    Durability,
    Effect,
    LostLease,
    Purpose,
    Replay,
    ReplayStrategy,
    RolloutResult,
    RunConfig,
    SettleResult,
    StalenessPolicy,
    Submitted,
    Task,
    TaskContext,
    TaskLease,
    Topic,
)
from trajectory_manager.model.run_counts import RunCounts
from trajectory_manager.store.errors import store_error, unwrap
from trajectory_manager.store.interface import MAX_DEAD_LETTERS, MAX_REPLACEMENTS
from trajectory_manager.store.redis import keys


class RedisRunStore:
    """Implements `RunStore`."""

    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        # redis-py's types do not express that replies are bytes.
        self._redis: Any = redis
        self._scripts = scripts
        self._configs: dict[str, RunConfig] = {}

    async def create_run(self, run_id: str, config: RunConfig) -> RunConfig | None:
        """Create the run; return the existing config if there is one."""
        # Listed first: a run that exists and is not listed would never be swept.
        await self._scripts.call("register_run", keys=[keys.RUNS], args=[run_id])
        existing = await self._call("create_run", run_id, json.dumps(asdict(config)))
        return _config(existing[0]) if existing else None

    async def run_ids(self) -> list[str]:
        """The names of all runs, sorted."""
        with store_errors("run_ids"):
            return sorted(name.decode() for name in await self._redis.smembers(keys.RUNS))

    async def config(self, run_id: str) -> RunConfig:
        """The rules of a run, cached: they never change."""
        if run_id not in self._configs:
            with store_errors("config"):
                text = await self._redis.get(keys.run_keys(run_id)[0])
            if text is None:
                raise store_error("UNKNOWN_RUN", run_id)
            # Fixed when the run is created, so it may be remembered.
            self._configs[run_id] = _config(text)
        return self._configs[run_id]

    async def version(self, run_id: str, topic: Topic) -> int:
        """The change number of `topic`."""
        await self.config(run_id)
        with store_errors("version"):
            value = await self._redis.hget(keys.run_keys(run_id)[1], f"version:{topic.value}")
        return int(value or 0)

    async def submit(self, run_id: str, tasks: Sequence[Task], max_queued: int) -> Submitted:
        """Queue all tasks that are new, or none."""
        entries = [
            part
            for task in tasks
            for part in (task.task_id, int(task.purpose), json.dumps(asdict(task)))
        ]
        accepted_tasks, free = await self._call("submit_tasks", run_id, max_queued, *entries)
        return Submitted(num_accepted=accepted_tasks, num_free=free)

    async def lease_task(
        self, run_id: str, purposes: Sequence[Purpose], nonce: str
    ) -> TaskLease | None:
        """Lease one open slot, admitting a group if none is open."""
        reply = await self._call(
            "lease_task", run_id, nonce, *(int(purpose) for purpose in purposes)
        )
        if not reply:
            return None
        rollout_id, task, seconds = reply
        return TaskLease(
            task=_task(task),
            rollout_id=rollout_id.decode(),
            nonce=nonce,
            seconds=float(seconds),
        )

    async def admit_recorded(self, run_id: str, tasks: Sequence[Task]) -> Submitted:
        """Admit groups whose rollouts are recorded, all or none."""
        entries = [part for task in tasks for part in (task.task_id, json.dumps(asdict(task)))]
        new, free = await self._call("admit_recorded", run_id, *entries)
        return Submitted(num_accepted=new, num_free=free)

    async def extend_tasks(self, run_id: str, leases: Sequence[tuple[str, str]]) -> list[bool]:
        """Extend leases (rollout_id, nonce); False for those that are gone."""
        flat = [part for lease in leases for part in lease]
        (held,) = await self._call("extend_tasks", run_id, *flat)
        return [flag == 1 for flag in held]

    async def register_rollout(
        self, run_id: str, rollout_id: str, nonce: str | None
    ) -> TaskContext | None:
        """Add the rollout to its run, after checking its lease."""
        purpose, required_weight_version = await self._call(
            "register_rollout", run_id, rollout_id, int(nonce is not None), nonce or ""
        )
        return TaskContext(Purpose(int(purpose)), int(required_weight_version)) if purpose else None

    async def listed(self, run_id: str, start: int, limit: int) -> list[str]:
        """Rollouts in the order they were registered."""
        await self.config(run_id)
        with store_errors("rollouts"):
            names = await self._redis.zrange(_key(run_id, "rollouts"), start, start + limit - 1)
        return [name.decode() for name in names]

    async def add_outbox_marks(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Mark rollouts that are about to finish."""
        await self._call("add_outbox_marks", run_id, *rollout_ids)

    async def remove_outbox_marks(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Remove the marks of rollouts that did not finish."""
        await self._call("remove_outbox_marks", run_id, *rollout_ids)

    async def unsettled(self, run_id: str, limit: int) -> list[str]:
        """Rollouts with an outbox mark, oldest first."""
        await self.config(run_id)
        with store_errors("unsettled"):
            names = await self._redis.zrange(_key(run_id, "outbox"), 0, limit - 1)
        return [name.decode() for name in names]

    async def expired(self, run_id: str, limit: int) -> list[LostLease]:
        """Task leases that are over while their rollout is not settled."""
        (over,) = await self._call("list_ended_leases", run_id, limit)
        return [
            LostLease(rollout_id=name.decode(), surplus=float(score) == 0)
            for name, score in zip(over[::2], over[1::2], strict=True)
        ]

    async def settle(self, run_id: str, results: Sequence[RolloutResult]) -> list[SettleResult]:
        """Apply the results of finished rollouts to their groups."""
        args = [part for result in results for part in (result.rollout_id, _result_text(result))]
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

    async def dead_letters(self, run_id: str, start: int, limit: int) -> list[DeadLetter]:
        """A page of dead letters, oldest first."""
        page = await self._call("list_dead_letters", run_id, start, limit)
        return [
            _dead_letter(task, letter) for task, letter in zip(page[::2], page[1::2], strict=True)
        ]

    async def requeue(self, run_id: str, task_ids: Sequence[str]) -> int:
        """Queue the tasks of dead letters again; return how many."""
        (number,) = await self._call("requeue_dead_letters", run_id, *task_ids)
        return int(number)

    async def add_stored_tokens(self, run_id: str, delta: int) -> None:
        """Add to the run's count of stored tokens."""
        await self._call("add_stored_tokens", run_id, delta)

    async def run_counts(self, run_id: str) -> RunCounts:
        """Counts of the run."""
        counts = await self._call("run_counts", run_id)
        return RunCounts(**dict(zip(RunCounts.__dataclass_fields__, counts, strict=True)))

    async def _call(self, script: str, run_id: str, *args: Any) -> list[Any]:
        reply = await self._scripts.call(script, keys=keys.run_keys(run_id), args=[run_id, *args])
        return unwrap(reply)


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
            "tokens": result.num_tokens,
            "message": result.failure_message,
        }
    )


def _text(number: float) -> str:
    # Adding zero makes -0.0 and 0.0 the same text.
    return repr(number + 0.0)


def _task(text: bytes) -> Task:
    fields = json.loads(text)
    return Task(**{**fields, "purpose": Purpose(fields["purpose"])})


def _dead_letter(task: bytes, text: bytes) -> DeadLetter:
    fields = json.loads(text)
    return DeadLetter(
        task=_task(task),
        reason=DeadLetterReason(fields["reason"]),
        message=fields["message"],
        time=fields["time"],
        attempts=tuple(fields["attempts"]),
    )


def _config(text: bytes) -> RunConfig:
    fields = json.loads(text)
    fields["staleness_policy"] = StalenessPolicy(fields["staleness_policy"])
    fields["durability"] = Durability(fields["durability"])
    fields["required_columns"] = tuple(fields["required_columns"])
    if replay := fields["replay"]:
        fields["replay"] = Replay(**{**replay, "strategy": ReplayStrategy(replay["strategy"])})
    return RunConfig(**fields)
