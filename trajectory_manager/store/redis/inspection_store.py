"""What is kept for inspection of a run. No decision depends on it.

The index has a row for each of the newest rollouts that have finished; a rollout without one is
running, or is older than the index: its header says the same. What a step trained on is kept for
the newest steps.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trajectory_manager.model.records import RolloutSummary
from trajectory_manager.store.errors import unwrap
from trajectory_manager.store.redis import keys
from trajectory_manager.store.redis.run_scripts import RunScripts

# A row of another length was written by another release, and counts as missing.
_ROW = struct.Struct("<4B2?I4q3dq")
_STEP = struct.Struct("<q")
DELETED = b"-"
"""The row of a rollout that was deleted."""


class Row(NamedTuple):
    number: int
    """Its place in the order in which the run's rollouts were started, from 1; 0: not started."""
    rollout_id: str
    summary: RolloutSummary | None
    """None: the index has no row for it."""
    deleted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPage:
    """Some rollouts, newest first."""

    rows: list[Row]
    """As many as were asked for, or all there are."""
    num_started: int
    num_unindexed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRecord:
    """What a step trained on of a sample, in two parts that this store does not read."""

    sample_id: str
    summary: bytes
    """What lists show."""
    tokens: bytes
    """Values of its tokens."""


class InspectionStore(RunScripts):
    """The index of a run's rollouts, and what its steps trained on; NOT_FOUND without the run."""

    async def newest(self, run_id: str, before: int, limit: int) -> IndexPage:
        """At most `limit` rollouts that were started before number `before`; 0: the newest."""
        found = await self._call("list_rows", run_id, before, limit)
        started, floor, first, names, rows = found
        numbers = range(int(first), int(first) - len(names), -1)
        return IndexPage(
            rows=[
                _row(number, name.decode(), row)
                for number, name, row in zip(numbers, names, rows, strict=True)
            ],
            num_started=int(started),
            num_unindexed=int(floor),
        )

    async def rows(self, run_id: str, rollout_ids: Sequence[str]) -> list[Row]:
        """The row of each; `number` is not read."""
        if not rollout_ids:
            return []
        (found,) = await self._call("read_rows", run_id, *rollout_ids)
        return [_row(0, name, row) for name, row in zip(rollout_ids, found, strict=True)]

    async def keep(self, run_id: str, summaries: Mapping[str, RolloutSummary | None]) -> None:
        """Add rows of finished rollouts that lack one; None: the rollout was deleted."""
        if summaries:
            rows = ((n, DELETED if s is None else packed(s)) for n, s in summaries.items())
            await self._call("keep_rows", run_id, *(part for row in rows for part in row))

    async def forget(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        if rollout_ids:
            await self._call("forget_rows", run_id, DELETED, *rollout_ids)

    async def trim(self, run_id: str, max_rollouts: int) -> None:
        """Drop some of the rows that are older than the newest `max_rollouts`."""
        await self._call("trim_rows", run_id, max_rollouts)

    async def of_group(self, run_id: str, group_id: str) -> list[str]:
        """The rollouts of a task, newest first."""
        (names,) = await self._call("list_group_rollouts", run_id, group_id)
        return [name.decode() for name in names]

    async def of_step(self, run_id: str, step: int) -> list[str]:
        """The rollouts of the samples of a step: recorded, committed, or leased."""
        recorded = await self.trained_samples(run_id, step)
        (names,) = (recorded,) if recorded else await self._call("list_step_rollouts", run_id, step)
        texts = (name if isinstance(name, str) else name.decode() for name in names)
        return list(dict.fromkeys(text.partition("#")[0] for text in texts))

    async def record_trained(
        self,
        run_id: str,
        epoch: int,
        step: int,
        records: Sequence[TrainedRecord],
        num_kept_steps: int,
    ) -> None:
        """Add to what is recorded of `step`; what other trainers recorded of it is forgotten.

        So are the steps before the newest `num_kept_steps` up to it, and later ones of other
        trainers.

        Raises:
            ServiceError: STALE_EPOCH.
        """
        flat = (p for each in records for p in (each.sample_id, each.summary, each.tokens))
        (forgotten,) = unwrap(
            await self._scripts.call(
                "record_trained",
                keys=[*keys.run_keys(run_id), *keys.trained_keys(run_id, step)],
                args=[run_id, epoch, step, num_kept_steps, packed_step(step), *flat],
            )
        )
        # Before their entries, so that the next record completes an interrupted one.
        for number in forgotten:
            names = keys.trained_keys(run_id, number)
            await self._scripts.read([("UNLINK", name) for name in names])
            await self._scripts.read([("HDEL", keys.trained_steps(run_id), number)])

    async def trained_steps(self, run_id: str) -> list[int]:
        """The steps of which something is recorded, oldest first."""
        (found,) = await self._scripts.read([("HKEYS", keys.trained_steps(run_id))])
        return sorted(map(int, found))

    async def trained_samples(self, run_id: str, step: int) -> list[str]:
        """The samples that are recorded of a step, by name."""
        (found,) = await self._scripts.read([("HKEYS", keys.trained_keys(run_id, step)[0])])
        return sorted(name.decode() for name in found)

    async def trained(
        self, run_id: str, step: int, sample_ids: Sequence[str], *, with_tokens: bool
    ) -> list[TrainedRecord]:
        """What is recorded of these samples; those that are not are left out."""
        if not sample_ids:
            return []
        names = keys.trained_keys(run_id, step)[: 1 + with_tokens]
        parts = await self._scripts.read([("HMGET", name, *sample_ids) for name in names])
        tokens = parts[1] if with_tokens else [b""] * len(sample_ids)
        return [
            TrainedRecord(sample_id=name, summary=summary, tokens=values or b"")
            for name, summary, values in zip(sample_ids, parts[0], tokens, strict=True)
            if summary is not None
        ]


def _row(number: int, rollout_id: str, row: bytes | None) -> Row:
    return Row(number, rollout_id, unpacked(rollout_id, row), deleted=row == DELETED)


def packed(summary: RolloutSummary) -> bytes:
    """The row of a rollout; its step is last, so that a script can replace it."""
    reward = math.nan if summary.reward is None else summary.reward
    return _ROW.pack(*summary._replace(reward=reward)[1:])


def packed_step(step: int) -> bytes:
    """The end of a row."""
    return _STEP.pack(step)


def unpacked(rollout_id: str, row: bytes | None) -> RolloutSummary | None:
    """The rollout of a row; None: there is none that can be read."""
    if row is None or len(row) != _ROW.size:
        return None
    found = RolloutSummary(rollout_id, *_ROW.unpack(row))
    assert found.reward is not None, "a row has a number, which may be none"
    return found._replace(reward=None) if math.isnan(found.reward) else found
