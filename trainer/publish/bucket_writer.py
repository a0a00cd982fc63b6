"""What a rank does of a publish beside training: gather, convert, write and send its buckets.

    EMPTY -> (hold) HELD -> (start) WRITING -> REPORTED -> (message) WRITING, HELD or EMPTY

Training waits for the copy of this rank's part alone. A bucket is in memory once, and once more
where its layout is converted; an owner's next one is gathered when it is written. The checksum is
computed while the bytes are written. The file stays until the version is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event, Thread

import torch
from seamflow.weights.v1 import weight_service_pb2 as pb
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from services.lib.weight_files.folder_names import sees
from trainer.commands import WriteBuckets
from trainer.fsync_files import tensors_digest
from trainer.publish.attempt_messages import (
    AttemptMessages,
    BucketGather,
    BucketsLostError,
    Message,
    WrittenFile,
    connected,
)
from trainer.publish.bucket_plan import Bucket, BucketPlan, Convert
from trainer.publish.weight_folder import forget_versions, write_weights

_END_SECONDS = 10.0
"""Longest wait for a thread at the end; one that waits for a lost rank takes longer."""

Upload = Callable[[pb.UploadShardsRequest, Path, pb.WeightFile, Callable[[], bool]], None]
"""Sends a file of a folder, under the head's version and epoch; gives up when the last argument
returns true. Blocks."""

PHASE_SECONDS = 600.0
"""Deadline of each phase of a publish: begin, write and upload, commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A rank's copy of its parts of the published weights."""

    plan: BucketPlan
    """The same on every rank."""
    parts: Mapping[str, torch.Tensor]
    """On the host, in the published type; whole after `wait`."""
    convert: Convert
    """Names and layouts of a model folder."""
    wait: Callable[[], None] = lambda: None
    """Blocks until the parts are copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingRank:
    """The rank that writes."""

    number: int
    """Among the ranks."""
    seconds: float = PHASE_SECONDS
    """Of a phase."""
    upload: Upload | None = None
    """Sends what the weights service cannot see; None: who reads the reports does."""
    uploads: int = 1


class BucketWriter:
    """Holds a rank's newest snapshot, and writes it in a thread."""

    def __init__(self, rank: WritingRank, store: Store) -> None:
        self._rank, self._store = rank, store
        self._snapshot: Snapshot | None = None
        self._attempt: _Attempt | None = None
        self._thread: Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a thread may still read a snapshot."""
        return self._attempt is not None and not self._attempt.ended.is_set()

    def hold(self, snapshot: Snapshot) -> None:
        """Take a snapshot in place of the one before."""
        self.forget()
        self._snapshot = snapshot

    def start(self, order: WriteBuckets) -> None:
        """Begin to write; an attempt before ends first. A rank without a part does nothing."""
        before, snapshot = self._attempt, self._snapshot
        if before is not None:
            before.stopped.set()
        if snapshot is None or self._rank.number not in snapshot.plan.ranks:
            return
        messages = AttemptMessages(self._store, order.attempt)
        self._attempt = _Attempt(self._rank, messages, order, snapshot)
        work = partial(_after, before, self._attempt, self._release)
        self._thread = Thread(target=work, daemon=True, name="publish")
        self._thread.start()

    def forget(self) -> None:
        """Forget the snapshot; an attempt that has not ended does so soon."""
        if self._attempt is not None:
            self._attempt.stopped.set()
        self._snapshot = None

    def close(self) -> None:
        """Forget the snapshot and wait for its thread: a process that ends meanwhile aborts."""
        self.forget()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _release(self, snapshot: Snapshot) -> None:
        if self._snapshot is snapshot:
            self._snapshot = None


def _after(before: _Attempt | None, attempt: _Attempt, release: Callable[[Snapshot], None]) -> None:
    """Carry out an attempt when the one before has ended: a thread cannot be cancelled."""
    if before is not None:
        before.ended.wait()
    if attempt.run():
        release(attempt.snapshot)
    attempt.drop()


class _Attempt:
    """One attempt to write a snapshot."""

    def __init__(
        self, rank: WritingRank, messages: AttemptMessages, order: WriteBuckets, snapshot: Snapshot
    ) -> None:
        self.snapshot = snapshot
        self.ended, self.stopped = Event(), Event()
        self._rank, self._messages, self._order = rank, messages, order
        self._files: dict[str, pb.WeightFile] = {}
        self._peak_bytes = 0
        self._spool = Path(order.spool)

    def run(self) -> bool:
        """Write all that is this rank's, and wait for the outcome; whether it is committed."""
        try:
            self._write_all()
            return self._attend() == Message.COMMITTED
        except Exception as error:
            with suppress(RuntimeError):  # without the store nobody waits for this rank
                self._messages.report_failure(error)
            return False
        finally:
            self.ended.set()

    def drop(self) -> None:
        """Keep nothing of the snapshot."""
        self.snapshot = replace(self.snapshot, parts={})

    def _write_all(self) -> None:
        self.snapshot.wait()
        self._is_shared = self._sees_folder()
        if self._order.weight_version and not self._is_shared:
            forget_versions(self._spool.parent, self._order.weight_version - 1)
            self._spool.mkdir(parents=True, exist_ok=True)
        place = PrefixStore("gather", self._messages.store)
        plan, rank = self.snapshot.plan, self._rank
        with connected(plan, self.snapshot.parts, rank.number, place, rank.seconds) as gather:
            self._write_buckets(gather)

    def _sees_folder(self) -> bool:
        name, content = self._order.probe
        probe = pb.FolderProbe(name=name, content=bytes.fromhex(content))
        return bool(self._order.folder) and sees(Path(self._order.folder), probe)

    def _write_buckets(self, gather: BucketGather) -> None:
        written: list[Future[None]] = []
        sent: list[Future[None]] = []
        uploads = self._rank.uploads
        with ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(uploads) as sender:

            def write(bucket: Bucket, tensors: dict[str, torch.Tensor]) -> None:
                sent.append(sender.submit(self._send, self._write(bucket, tensors)))

            try:
                for bucket in self.snapshot.plan.buckets:
                    is_mine = bucket.owner == self._rank.number
                    if is_mine and written:
                        written[-1].result()  # before there is a second one in memory
                    self._check()
                    tensors = gather.gather(bucket)
                    if is_mine:
                        written.append(writer.submit(write, bucket, tensors))
                    del tensors
                for works in (written, sent):
                    for work in works:
                        work.result()
            except BaseException:
                self.stopped.set()  # so that what is being sent ends too
                raise

    def _write(self, bucket: Bucket, tensors: dict[str, torch.Tensor]) -> pb.WeightFile:
        converted = self._converted(bucket, tensors)
        if not self._order.weight_version:
            return pb.WeightFile(name=bucket.file, sha256=tensors_digest(converted))
        folder = Path(self._order.folder) if self._is_shared else self._spool
        file = write_weights(folder / bucket.file, converted, durable=self._is_shared)
        self._files[file.name] = file
        return file

    def _converted(
        self, bucket: Bucket, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The tensors of the file; those given are forgotten group by group."""
        found: dict[str, torch.Tensor] = {}
        for group in bucket.groups:
            given = {source.name: tensors.pop(source.name) for source in group.sources}
            found |= self.snapshot.convert(given)
            self._count((*tensors.values(), *given.values(), *found.values()))
        return found

    def _count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note how many bytes are held besides the snapshot."""
        own = {_memory(each) for each in self.snapshot.parts.values()}
        held = {_memory(each) for each in tensors} - own
        self._peak_bytes = max(self._peak_bytes, sum(num_bytes for _, num_bytes in held))

    def _send(self, file: pb.WeightFile) -> None:
        """Bring a file to the weights service, if this is for this rank to do, and report it."""
        is_here = not self._is_shared
        version, epoch, upload = self._order.weight_version, self._order.epoch, self._rank.upload
        if epoch and upload is not None and is_here:
            head = pb.UploadShardsRequest(weight_version=version, epoch=epoch)
            upload(head, self._spool, file, self._is_over)
            is_here = False
        report = WrittenFile(
            name=file.name,
            num_bytes=file.num_bytes,
            sha256=file.sha256,
            is_here=is_here,
            peak_bytes=self._peak_bytes,
        )
        self._messages.report(report)

    def _attend(self) -> Message:
        """Follow rank 0's messages until it has ended the attempt; the last one."""
        while True:
            message = self._messages.next_message()
            self._check()
            if message == Message.AGAIN:
                for file in self._files.values():
                    self._send(file)
            elif message is not None:
                break
        if message == Message.COMMITTED and not self._is_shared:
            forget_versions(self._spool.parent, self._order.weight_version)
        return message

    def _is_over(self) -> bool:
        return self.stopped.is_set() or self._messages.has_message()

    def _check(self) -> None:
        if self.stopped.is_set():
            raise BucketsLostError("this attempt to publish was given up")


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
