"""RunStore on Redis: every change is one Lua script on the keys of one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from redis.asyncio import Redis

from services.chassis.redis import Scripts, store_errors
from trajectory_manager import keys
from trajectory_manager.records import (
    Durability,
    Effect,
    LeaseAttempt,
    Purpose,
    Readiness,
    Reconciled,
    RunConfig,
    Settled,
    Settlement,
    StalenessPolicy,
    StepLease,
    Submitted,
    Task,
    TaskLease,
    Topic,
)
from trajectory_manager.refusals import accepted, refusal
from trajectory_manager.store import MAX_REPLACEMENTS


class RedisRunStore:
    """Implements `RunStore`."""

    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        # redis-py's types cannot say that replies are bytes.
        self._redis: Any = redis
        self._scripts = scripts

    async def create_run(self, run_id: str, config: RunConfig) -> RunConfig | None:
        """See `RunStore`."""
        # Listed first: a run that exists and is not listed would never be swept.
        with store_errors("create_run"):
            await self._redis.sadd(keys.RUNS, run_id)
        existing = await self._call("create_run", run_id, json.dumps(asdict(config)))
        return _config(existing[0]) if existing else None

    async def run_ids(self) -> list[str]:
        """See `RunStore`."""
        with store_errors("run_ids"):
            return sorted(name.decode() for name in await self._redis.smembers(keys.RUNS))

    async def config(self, run_id: str) -> RunConfig:
        """See `RunStore`."""
        with store_errors("config"):
            text = await self._redis.get(keys.run_keys(run_id)[0])
        if text is None:
            raise refusal("UNKNOWN_RUN", run_id)
        return _config(text)

    async def version(self, run_id: str, topic: Topic) -> int:
        """See `RunStore`."""
        with store_errors("version"):
            value = await self._redis.hget(keys.run_keys(run_id)[1], f"version:{topic.value}")
        return int(value or 0)

    async def submit(self, run_id: str, tasks: Sequence[Task], max_queued: int) -> Submitted:
        """See `RunStore`."""
        entries = [
            part
            for task in tasks
            for part in (task.task_id, int(task.purpose), json.dumps(asdict(task)))
        ]
        accepted_tasks, free = await self._call("submit", run_id, max_queued, *entries)
        return Submitted(num_accepted=accepted_tasks, num_free=free)

    async def lease_task(
        self, run_id: str, purposes: Sequence[Purpose], nonce: str
    ) -> TaskLease | None:
        """See `RunStore`."""
        reply = await self._call(
            "lease_task", run_id, nonce, *(int(purpose) for purpose in purposes)
        )
        if not reply:
            return None
        rollout_id, task, seconds = reply
        fields = json.loads(task)
        return TaskLease(
            task=Task(**{**fields, "purpose": Purpose(fields["purpose"])}),
            rollout_id=rollout_id.decode(),
            nonce=nonce,
            seconds=float(seconds),
        )

    async def extend_tasks(self, run_id: str, leases: Sequence[tuple[str, str]]) -> list[bool]:
        """See `RunStore`."""
        flat = [part for lease in leases for part in lease]
        (held,) = await self._call("extend_tasks", run_id, *flat)
        return [flag == 1 for flag in held]

    async def enlist(self, run_id: str, rollout_id: str, nonce: str | None) -> Purpose | None:
        """See `RunStore`."""
        (purpose,) = await self._call(
            "enlist", run_id, rollout_id, int(nonce is not None), nonce or ""
        )
        return Purpose(int(purpose)) if purpose else None

    async def listed(self, run_id: str, start: int, limit: int) -> list[str]:
        """See `RunStore`."""
        await self.config(run_id)
        with store_errors("listed"):
            names = await self._redis.zrange(_key(run_id, "listed"), start, start + limit - 1)
        return [name.decode() for name in names]

    async def announce(self, run_id: str, rollout_id: str) -> None:
        """See `RunStore`."""
        await self._call("announce", run_id, rollout_id)

    async def unsettled(self, run_id: str, limit: int) -> list[str]:
        """See `RunStore`."""
        with store_errors("unsettled"):
            names = await self._redis.zrange(_key(run_id, "marks"), 0, limit - 1)
        return [name.decode() for name in names]

    async def expired(self, run_id: str, limit: int) -> list[str]:
        """See `RunStore`."""
        (names,) = await self._call("expired", run_id, limit)
        return [name.decode() for name in names]

    async def settle(self, run_id: str, settlement: Settlement) -> Settled:
        """See `RunStore`."""
        # Adding zero makes -0.0 and 0.0 the same text.
        reward = "" if settlement.reward is None else repr(settlement.reward + 0.0)
        effect, reason = await self._call(
            "settle",
            run_id,
            settlement.rollout_id,
            int(settlement.finished),
            reward,
            settlement.min_weight_version,
            MAX_REPLACEMENTS,
            *settlement.sample_ids,
        )
        return Settled(effect=Effect(effect.decode()), reason=reason.decode())

    async def reconcile(self, run_id: str, step: int, trainer_id: str) -> Reconciled:
        """See `RunStore`."""
        epoch, pending = await self._call("reconcile", run_id, step, trainer_id)
        return Reconciled(epoch=int(epoch), pending_steps=tuple(pending))

    async def lease_samples(
        self, run_id: str, epoch: int, step: int, base_weight_version: int, num_groups: int
    ) -> LeaseAttempt:
        """See `RunStore`."""
        num_too_old, *entry = await self._call(
            "lease_samples", run_id, epoch, step, base_weight_version, num_groups
        )
        lease = _step_lease(step, entry[0]) if entry else None
        return LeaseAttempt(lease=lease, num_too_old=num_too_old)

    async def extend_samples(self, run_id: str, epoch: int, step: int) -> float:
        """See `RunStore`."""
        (seconds,) = await self._call("extend_samples", run_id, epoch, step)
        return float(seconds)

    async def commit(self, run_id: str, epoch: int, step: int) -> int:
        """See `RunStore`."""
        (num_samples,) = await self._call("commit", run_id, epoch, step)
        return int(num_samples)

    async def release(self, run_id: str, epoch: int, step: int) -> None:
        """See `RunStore`."""
        await self._call("release", run_id, epoch, step)

    async def readiness(self, run_id: str) -> Readiness:
        """See `RunStore`."""
        counts = await self._call("readiness", run_id)
        return Readiness(**dict(zip(Readiness.__dataclass_fields__, counts, strict=True)))

    async def _call(self, script: str, run_id: str, *args: Any) -> list[Any]:
        reply = await self._scripts.call(script, keys=keys.run_keys(run_id), args=[run_id, *args])
        return accepted(reply)


def _key(run_id: str, part: str) -> str:
    return keys.run_keys(run_id)[keys.RUN_PARTS.index(part)]


def _config(text: bytes) -> RunConfig:
    fields = json.loads(text)
    fields["staleness_policy"] = StalenessPolicy(fields["staleness_policy"])
    fields["durability"] = Durability(fields["durability"])
    return RunConfig(**fields)


def _step_lease(step: int, entry: bytes) -> StepLease:
    fields = json.loads(entry)
    return StepLease(
        step=step, base_weight_version=fields["base"], sample_ids=tuple(fields["samples"])
    )
