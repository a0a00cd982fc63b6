"""Weights that one process has whole, to be published without a trainer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from trainer.commands import WriteBuckets
from trainer.publish.bucket_plan import bucket_limit, plan_buckets, whole_tensors
from trainer.publish.bucket_writer import PHASE_SECONDS, BucketWriter, Snapshot, WritingRank
from trainer.publish.snapshot_weights import SnapshotWeights


def held_weights(
    tensors: Mapping[str, torch.Tensor],
    *,
    adapter: bool = False,
    bucket_bytes: int | None = None,
    seconds: float = PHASE_SECONDS,
) -> SnapshotWeights:
    """Weights that this process alone has whole.

    Args:
        tensors: by the names in a model folder; they must not change.
        adapter: they are a LoRA adapter.
        bucket_bytes: of a file; None: as large as a trainer makes them.
        seconds: of a phase.
    """
    sources = whole_tensors(tensors)
    plan = plan_buckets(sources, dict, bucket_bytes or bucket_limit(sources), adapter=adapter)
    store = HashStore()
    writer = BucketWriter(WritingRank(number=0, seconds=seconds), store)
    writer.hold(Snapshot(plan=plan, parts=dict(tensors), convert=dict))

    async def give(order: WriteBuckets) -> None:
        writer.start(order)

    return SnapshotWeights(plan, store, give)
