"""The step ledger: every change is one Lua script on the keys of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from seamflow.trajectory.v1 import sample_service_pb2 as pb

from trajectory_manager.model.records import MAX_DEAD_LETTERS, SlotName
from trajectory_manager.model.runs import LeaseAttempt, PublishWait, StepLease
from trajectory_manager.store.redis.run_scripts import RunScripts


class LedgerStore(RunScripts):
    """The step ledger of each run: steps, epochs, commits."""

    async def reconcile(self, run_id: str, step: int, trainer_id: str) -> pb.ReconcileResponse:
        """Make `trainer_id` the trainer, `step` the committed one.

        Entries up to `step` are consumed. Later ones stay if they follow it without a gap;
        after a restore to an earlier step their groups return to the head of the queue.
        The newest that the last trainer leased becomes dead letters when another trainer
        reconciles, if max_deliveries trainers leased it; later ones return to the head of the
        queue. Those before it were only repeated: no checkpoint covered them yet.

        Raises:
            ServiceError: STALE_EPOCH for a trainer that was replaced before.
        """
        _, epoch, pending, open_step = await self._commit(run_id, step, "", trainer_id)
        return pb.ReconcileResponse(epoch=int(epoch), pending_steps=pending, open_step=open_step)

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
        """The ledger entry of `step`, written now if enough fresh groups are ready.

        It takes `num_groups` (0: groups_per_step), or what is ready of at least `min_groups` (0:
        the same). A repeated step returns the same entry. With `streaming` any group suffices for
        an open entry, which grows with each call until it is complete; the base version stays that
        of the first call. An open entry does not reopen admission: groups admitted now would be
        sampled with older weights than necessary.
        Groups go in the order they were completed. With a fifo_window only the first `fifo_window`
        unleased groups by admission are eligible; a step that lacks groups waits for a running one
        of these. Groups beyond max_staleness become dead letters. Replayed groups are drawn when
        the entry is complete, outside admission and staleness.

        Raises:
            ServiceError: STALE_EPOCH, STEP_OUT_OF_ORDER (also after an open step),
                INVALID_ARGUMENT (num_groups, min_groups).
        """
        asked = (epoch, step, base_weight_version, num_groups, min_groups, +streaming)
        num_too_old, *entry = await self._call("lease_step", run_id, *asked, MAX_DEAD_LETTERS)
        lease = _step_lease(step, entry[0]) if entry else None
        return LeaseAttempt(lease=lease, num_too_old=num_too_old)

    async def await_step(self, run_id: str, epoch: int, step: int, base_weight_version: int) -> int:
        """Record that the trainer waits for `step`, which starts from these weights.

        Admission counts from it, and relies on this report after each step from then on. Complete
        groups beyond max_staleness become dead letters; their number is returned. No effect for a
        leased step.

        Raises:
            ServiceError: STALE_EPOCH.
        """
        asked = (epoch, step, base_weight_version)
        (num_too_old,) = await self._call("await_step", run_id, *asked, MAX_DEAD_LETTERS)
        return int(num_too_old)

    async def reject(
        self, run_id: str, epoch: int, step: int, messages: Mapping[str, str]
    ) -> pb.RejectGroupsResponse:
        """Take groups that cannot be trained out of `step`; `messages` by group say why.

        They become dead letters, the step opens for others, and later steps return to the head of
        the queue. Replayed groups leave the step and the replay buffer. Others are ignored.

        Raises:
            ServiceError: STALE_EPOCH, NOT_FOUND (the step is committed, or not leased).
        """
        named = chain.from_iterable(messages.items())
        reply = await self._call("reject_groups", run_id, epoch, step, MAX_DEAD_LETTERS, *named)
        num_rejected, is_open = reply
        return pb.RejectGroupsResponse(num_rejected=num_rejected, open=bool(is_open))

    async def extend_samples(self, run_id: str, epoch: int, step: int) -> float:
        """Renew the lease of a step; return the seconds it now lives."""
        (seconds,) = await self._call("extend_step", run_id, epoch, step)
        return float(seconds)

    async def commit(self, run_id: str, epoch: int, step: int) -> int:
        """Commit all entries up to `step`; return how many samples that covered.

        Raises:
            ServiceError: STALE_EPOCH, NOT_FOUND, STEP_OUT_OF_ORDER (an open step).
        """
        num_samples, *_ = await self._commit(run_id, step, epoch, "")
        return int(num_samples)

    async def publish_wait(self, run_id: str, epoch: int, weight_version: int) -> PublishWait:
        """What a publish of `weight_version` would make too old; the wait starts at the first call.

        Raises:
            ServiceError: STALE_EPOCH.
        """
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
