"""LedgerStore on Redis: every change is one Lua script on the keys of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from services.chassis.redis.scripts import Scripts
from trajectory_manager.model.records import SlotName
from trajectory_manager.model.steps import (
    LeaseAttempt,
    PublishWait,
    Reconciled,
    Rejected,
    StepLease,
)
from trajectory_manager.store.errors import unwrap
from trajectory_manager.store.interface import MAX_DEAD_LETTERS
from trajectory_manager.store.redis import keys


class RedisLedgerStore:
    """Implements `LedgerStore`."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def reconcile(self, run_id: str, step: int, trainer_id: str) -> Reconciled:
        """Make `trainer_id` the trainer, `step` the committed one."""
        _, epoch, pending, open_step = await self._commit(run_id, step, "", trainer_id)
        return Reconciled(epoch=int(epoch), pending_steps=tuple(pending), open_step=open_step)

    async def lease_samples(
        self,
        run_id: str,
        epoch: int,
        step: int,
        base_weight_version: int,
        num_groups: int,
        min_groups: int = 0,
        streaming: bool = False,
    ) -> LeaseAttempt:
        """The ledger entry of `step`, written now if enough groups are ready."""
        asked = (epoch, step, base_weight_version, num_groups, min_groups, +streaming)
        num_too_old, *entry = await self._call("lease_step", run_id, *asked, MAX_DEAD_LETTERS)
        lease = _step_lease(step, entry[0]) if entry else None
        return LeaseAttempt(lease=lease, num_too_old=num_too_old)

    async def await_step(self, run_id: str, epoch: int, step: int, base_weight_version: int) -> int:
        """Record that the trainer waits for `step`; the number of groups too old for it."""
        asked = (epoch, step, base_weight_version)
        (num_too_old,) = await self._call("await_step", run_id, *asked, MAX_DEAD_LETTERS)
        return int(num_too_old)

    async def reject(
        self, run_id: str, epoch: int, step: int, messages: Mapping[str, str]
    ) -> Rejected:
        """Take groups out of `step`, which opens for others."""
        named = chain.from_iterable(messages.items())
        reply = await self._call("reject_groups", run_id, epoch, step, MAX_DEAD_LETTERS, *named)
        num_rejected, is_open = reply
        return Rejected(num_rejected=num_rejected, is_open=bool(is_open))

    async def extend_samples(self, run_id: str, epoch: int, step: int) -> float:
        """Renew the lease of a step; return the seconds it lives."""
        (seconds,) = await self._call("extend_step", run_id, epoch, step)
        return float(seconds)

    async def commit(self, run_id: str, epoch: int, step: int) -> int:
        """Commit all entries up to `step`; return how many samples that covered."""
        num_samples, *_ = await self._commit(run_id, step, epoch, "")
        return int(num_samples)

    async def publish_wait(self, run_id: str, epoch: int, weight_version: int) -> PublishWait:
        """What a publish of `weight_version` would make too old."""
        reply = await self._call("publish_wait", run_id, epoch, weight_version)
        seconds, num_blocking_groups, running = reply
        return PublishWait(
            seconds=float(seconds),
            num_blocking_groups=num_blocking_groups,
            running=tuple(name.decode() for name in running),
        )

    async def committed_steps(self, run_id: str, rollout_ids: Sequence[str]) -> list[int]:
        """The committed step that trained each rollout; 0 for none."""
        args: list[Any] = []
        for rollout_id in rollout_ids:
            # What was not made from a lease has no step.
            name = SlotName.parse(rollout_id) or SlotName("", 0, 0)
            args += [name.task_id, name.slot, name.attempt]
        (steps,) = await self._call("list_committed_steps", run_id, *args)
        return list(steps)

    async def _commit(self, run_id: str, step: int, epoch: int | str, trainer_id: str) -> list[Any]:
        return await self._call("commit_step", run_id, step, epoch, trainer_id, MAX_DEAD_LETTERS)

    async def _call(self, script: str, run_id: str, *args: Any) -> list[Any]:
        reply = await self._scripts.call(script, keys=keys.run_keys(run_id), args=[run_id, *args])
        return unwrap(reply)


def _step_lease(step: int, entry: bytes) -> StepLease:
    fields = json.loads(entry)
    return StepLease(
        step=step,
        base_weight_version=fields["base"],
        sample_ids=tuple(fields["samples"]),
        replayed_ids=tuple(fields["replayed"]),
        num_deliveries=fields["deliveries"],
        is_open=fields.get("open", False),
        streamed=fields.get("streamed", False),
    )
