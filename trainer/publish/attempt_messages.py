"""Messages between rank 0 and the ranks that write a version, through the store of the ranks.

The ranks report files and failures, counted from 1; rank 0 sends messages, counted from 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from itertools import count
from typing import Any

import seamflow.errors
import torch
import torch.distributed as dist
from seamflow.errors import SeamflowError
from seamflow.weights.v1 import weight_service_pb2 as pb
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.commands import arrived, receive, send
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
        parts: of each tensor of which this rank has some, on the host.
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
    """This rank's side; the buckets are gathered one after the other, on each rank in order.

    Over gloo, in a process group that is none of torch.distributed's: the collectives of training
    run meanwhile, and its failure costs one attempt to publish and no more.
    """

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


_REPORT, _MESSAGE = "report", "message"


class Message(StrEnum):
    """Of rank 0, when all files are reported or it gives up."""

    AGAIN = "again"
    """Send again what the service lost of the files, and report all again."""
    END = "end"
    """This attempt has ended; the weights are kept for another one."""
    COMMITTED = "committed"
    """The version is published: forget weights and files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """One bucket's file, as its owner reports it."""

    name: str
    num_bytes: int
    sha256: str
    is_here: bool
    """In rank 0's folder for uploads, which rank 0 sends; else it is with the weights service."""
    peak_bytes: int
    """The most that its owner has held of buckets so far, besides its snapshot."""

    @property
    def described(self) -> pb.WeightFile:
        return pb.WeightFile(name=self.name, num_bytes=self.num_bytes, sha256=self.sha256)


class AttemptMessages:
    """The messages of one attempt to publish. Several threads may report; else each side
    calls from one thread at a time."""

    def __init__(self, store: Store, attempt: int) -> None:
        """`store`: of the ranks' commands; `attempt`: its number, unlike any other."""
        # A connection of its own, as one that waits serves nobody else.
        cloned: Store = store.clone()  # type: ignore[attr-defined]
        self.store: Store = PrefixStore(f"publish/{attempt}", cloned)
        """For whatever else belongs to the attempt."""
        self._num_read = self._num_told = 0

    def report(self, written: WrittenFile) -> None:
        self._report(asdict(written))

    def report_failure(self, error: Exception) -> None:
        """Tell rank 0 that this rank cannot go on."""
        self._report({"failure": _kind(error), "text": str(error), **_details(error)})

    def next_report(self) -> WrittenFile | None:
        """The next report of any rank; None: there is none after a second.

        Raises:
            BucketsLostError: the ranks could not bring the buckets together.
            OSError: a rank could not write its files.
            SeamflowError: the weights service refused a file.
            RuntimeError: a rank failed otherwise.
        """
        key = f"{_REPORT}/{self._num_read + 1}"
        if not arrived(self.store, key):
            return None
        self._num_read += 1
        found = json.loads(receive(self.store, key))
        if "failure" in found:
            raise _failure(found)
        return WrittenFile(**found)

    def tell(self, message: Message) -> None:
        self.store.set(f"{_MESSAGE}/{self._num_told}", message.value)
        self._num_told += 1

    def next_message(self) -> Message | None:
        """Rank 0's next message; None: there is none after a second."""
        key = f"{_MESSAGE}/{self._num_read}"
        if not arrived(self.store, key):
            return None
        self._num_read += 1
        return Message(self.store.get(key).decode())

    def has_message(self) -> bool:
        """Whether rank 0 has said something that `next_message` has not given yet."""
        return bool(self.store.check([f"{_MESSAGE}/{self._num_read}"]))

    def _report(self, content: dict[str, Any]) -> None:
        number = self.store.add(f"num_{_REPORT}s", 1)
        send(self.store, f"{_REPORT}/{number}", json.dumps(content).encode())


def _kind(error: Exception) -> str:
    if isinstance(error, BucketsLostError):
        return "lost"
    if isinstance(error, OSError):
        return "storage"
    return "refused" if isinstance(error, SeamflowError) else type(error).__name__


def _details(error: Exception) -> dict[str, str]:
    if not isinstance(error, SeamflowError):
        return {}
    return {"error": type(error).__name__, "reason": error.reason}


def _failure(found: dict[str, str]) -> Exception:
    kind, text = found["failure"], found["text"]
    if kind == "lost":
        return BucketsLostError(text)
    if kind == "storage":
        return OSError(text)
    if kind == "refused":
        error: SeamflowError = getattr(seamflow.errors, found["error"])(text, found["reason"])
        return error
    return RuntimeError(f"writing published weights: {kind}: {text}")
