"""A rank's thread that writes buckets ends before its process does."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from trainer.publish.bucket_plan import bucket_limit, plan_buckets, whole_tensors
from trainer.publish.bucket_writer import BucketWriter, Snapshot, WriteBuckets, WritingRank


def test_a_closed_writer_has_no_thread(tmp_path: Path) -> None:
    """*Control*: before, it waits for rank 0's last message."""
    tensors = {"weight": torch.zeros(4, 4)}
    sources = whole_tensors(tensors)
    plan = plan_buckets(sources, dict, bucket_limit(sources, 1 << 20), adapter=False)
    writer = BucketWriter(WritingRank(number=0, seconds=30.0), HashStore())
    writer.hold(Snapshot(plan=plan, parts=tensors, convert=dict))
    order = WriteBuckets(
        attempt=1, weight_version=1, epoch=0, spool=str(tmp_path), folder="", probe=("", "")
    )
    writer.start(order)
    assert writer.is_busy
    writer.close()
    assert not writer.is_busy
