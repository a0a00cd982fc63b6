"""Brings the parts of a bucket from the ranks that have them to its owner, over gloo.

The messages have a process group of their own, which is no group of torch.distributed's: the
collectives of training run meanwhile, and its failure costs one attempt to publish and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from trainer.publish.bucket_plan import Bucket, BucketPlan, Part, Source

_STALL_SECONDS = 120.0
"""Longest wait for another rank."""


class BucketsLostError(Exception):
    """The ranks could not bring the buckets together: one of them failed, or all is too slow."""


@contextmanager
def connected(
    plan: BucketPlan, parts: Mapping[str, torch.Tensor], rank: int, store: Store, seconds: float
) -> Iterator[BucketGather]:
    """Connect the ranks of a plan. Collective, unless nobody needs parts of another one.

    Args:
        plan: of the buckets.
        parts: of each tensor of which this rank has some, on the host.
        rank: this one.
        store: in which they meet, for this time alone.
        seconds: longest wait for another rank, if that is less than two minutes.

    Raises:
        BucketsLostError: they could not be connected.
    """
    group = None
    if plan.exchanges:
        longest = timedelta(seconds=min(seconds, _STALL_SECONDS))
        with _losses():
            group = dist.ProcessGroupGloo(store, rank, max(plan.ranks) + 1, longest)
    yield BucketGather(parts, rank, group)


class BucketGather:
    """This rank's side; the buckets are gathered one after the other, on each rank in order."""

    def __init__(self, parts: Mapping[str, torch.Tensor], rank: int, group: Any) -> None:
        self._parts, self._rank, self._group = parts, rank, group

    def gather(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """The whole tensors on the owner, elsewhere nothing. Collective.

        What the owner has whole is no copy.

        Raises:
            BucketsLostError: another rank failed, or did not come here in time.
        """
        tags = count()
        found: dict[str, torch.Tensor] = {}
        with _losses():
            waits: list[Any] = []
            for source in bucket.sources:
                if bucket.owner == self._rank:
                    found[source.name] = self._received(source, tags, waits)
                else:
                    waits += self._sent(source, bucket.owner, tags)
            for work in waits:
                work.wait()
        return found

    def _received(self, source: Source, tags: Iterator[int], waits: list[Any]) -> torch.Tensor:
        mine = self._parts.get(source.name)
        if mine is not None and len(source.parts) == 1:
            next(tags)
            return mine.reshape(source.shape)
        whole = torch.empty(source.shape, dtype=source.dtype)
        for part, tag in _tagged(source.parts, tags):
            target = whole.view(-1)[part.begin : part.end]
            if part.rank == self._rank:
                assert mine is not None, "the plan says so"
                target.copy_(mine.reshape(-1))
            elif len(target):
                waits.append(self._group.recv([target.view(torch.uint8)], part.rank, tag))
        return whole

    def _sent(self, source: Source, owner: int, tags: Iterator[int]) -> Iterator[Any]:
        for part, tag in _tagged(source.parts, tags):
            if part.rank == self._rank and part.end > part.begin:
                mine = self._parts[source.name].reshape(-1).view(torch.uint8)
                yield self._group.send([mine], owner, tag)


def _tagged(parts: Iterable[Part], tags: Iterator[int]) -> Iterator[tuple[Part, int]]:
    """Each part with the tag of its message, which all ranks count alike."""
    for part in parts:
        yield part, next(tags)


@contextmanager
def _losses() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what gloo and the store raise
        raise BucketsLostError(f"gathering published weights: {error}") from error
