"""A rank's thread that writes buckets ends before its process does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from seamflow.weights.v1 import weight_service_pb2 as pb
from torch.distributed import HashStore  # type: ignore[attr-defined]

from trainer.commands import WriteBuckets
from trainer.publish.attempt_messages import AttemptMessages
from trainer.publish.bucket_plan import bucket_limit, plan_buckets, whole_tensors
from trainer.publish.bucket_writer import BucketWriter, Snapshot, WritingRank


def test_a_closed_writer_has_no_thread(tmp_path: Path) -> None:
    """*Control*: before, it waits for rank 0's last message."""
    tensors = {"weight": torch.zeros(4, 4)}
    sources = whole_tensors(tensors)
    plan = plan_buckets(sources, dict, bucket_limit(sources), adapter=False)
    writer = BucketWriter(WritingRank(number=0, seconds=30.0), HashStore())
    writer.hold(Snapshot(plan=plan, parts=tensors, convert=dict))
    order = WriteBuckets(
        attempt=1, weight_version=1, epoch=0, spool=str(tmp_path), folder="", probe=("", "")
    )
    writer.start(order)
    assert writer.is_busy
    writer.close()
    assert not writer.is_busy


@pytest.mark.parametrize("uploads", [1, 3])
def test_a_rank_uploads_as_many_files_at_once_as_are_set(tmp_path: Path, uploads: int) -> None:
    """Each file once; *control*: with one, each waits for the one before."""
    tensors = {f"layers.{number}.weight": torch.zeros(4, 4) for number in range(3)}
    plan = plan_buckets(whole_tensors(tensors), dict, 1)
    together, running, most = threading.Barrier(uploads), set[str](), 0

    def upload(_head: object, _folder: object, file: pb.WeightFile, _over: object) -> None:
        nonlocal most
        running.add(file.name)
        together.wait(30)
        most = max(most, len(running))
        together.wait(30)
        running.discard(file.name)

    store = HashStore()
    writer = BucketWriter(WritingRank(number=0, seconds=30, upload=upload, uploads=uploads), store)
    writer.hold(Snapshot(plan=plan, parts=tensors, convert=dict))
    writer.start(WriteBuckets(attempt=1, weight_version=1, epoch=1, spool=str(tmp_path)))
    messages = AttemptMessages(store, 1)
    found = [messages.next_report() for _ in plan.buckets]
    writer.close()
    assert {each.name for each in found if each} == {bucket.file for bucket in plan.buckets}
    assert (len(plan.buckets), most) == (3, uploads)
