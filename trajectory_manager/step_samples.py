"""The samples of a leased step as the trainer gets them: fresh ones, then replayed ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from seamflow.trajectory.v1 import trajectory_pb2

from trajectory_manager import conversion, samples
from trajectory_manager.column_servicer import add_columns
from trajectory_manager.records import StalenessPolicy
from trajectory_manager.shards import cut
from trajectory_manager.step_records import StepLease
from trajectory_manager.store import Store

_SAMPLES_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """What a call of LeaseSamples answers."""

    messages: list[trajectory_pb2.Sample]
    """Samples in the ledger's order."""
    staleness: list[int]
    """Of each fresh one among them: versions behind the step's base version."""


async def read(
    store: Store, run_id: str, lease: StepLease, *, shard: int | None, packed: bool
) -> StepSamples:
    """The samples of a step, or of one shard of it."""
    config = await store.runs.config(run_id)
    shards = _shards(lease)
    wanted = {name for name, index in shards.items() if shard is None or index == shard}
    fresh = replace(lease, sample_ids=_those(lease.sample_ids, wanted))
    replayed = replace(lease, sample_ids=_those(lease.replayed_ids, wanted))
    # Replayed samples are old by intention: nothing of them is masked.
    whole = replace(config, staleness_policy=StalenessPolicy.DROP)
    built = await samples.build(store.tokens, run_id, config, fresh)
    again = await samples.build(store.tokens, run_id, whole, replayed)
    messages = []
    for index, sample in enumerate((*built, *again)):
        message = conversion.sample_to(sample, packed=packed)
        message.shard = shards[message.sample_id]
        message.replayed = index >= len(built)
        messages.append(message)
        if index % _SAMPLES_AT_ONCE == 0:
            await asyncio.sleep(0)  # appends must not wait behind a whole step
    await add_columns(store.columns, run_id, messages, config.required_columns)
    staleness = [lease.base_weight_version - sample.min_weight_version for sample in built]
    return StepSamples(messages=messages, staleness=staleness)


def _shards(lease: StepLease) -> dict[str, int]:
    names = (*lease.sample_ids, *lease.replayed_ids)
    # An entry of an older release knows no lengths: all count the same.
    lengths = lease.num_tokens or (1,) * len(names)
    return dict(zip(names, cut(lengths, lease.num_shards), strict=True))


def _those(names: Sequence[str], wanted: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in wanted)
