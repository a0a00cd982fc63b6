"""The weights of a step as rank 0 publishes them: the ranks write them and report their files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from seamflow.weights.v1 import weight_service_pb2 as pb
from torch.distributed import Store  # type: ignore[attr-defined]

from trainer.commands import WriteBuckets
from trainer.publish.attempt_messages import AttemptMessages, BucketsLostError, Message, WrittenFile
from trainer.publish.bucket_plan import BucketPlan

_ATTEMPTS = count(1)
"""Numbers of the attempts of this process."""


class SnapshotLostError(BucketsLostError):
    """A rank was lost with its part of the snapshot: publish newer weights."""


class Attempt:
    """One attempt to publish: the files as they are written, and messages to the ranks."""

    def __init__(
        self, plan: BucketPlan, messages: AttemptMessages, is_lost: Callable[[], bool]
    ) -> None:
        self._plan, self._messages, self._is_lost = plan, messages, is_lost
        self._outcome = Message.END

    async def files(self) -> AsyncIterator[WrittenFile]:
        """Each of the plan's files once, as soon as it is where it belongs.

        Raises:
            BucketsLostError: the ranks could not bring the buckets together.
            OSError: a rank could not write its files.
            SeamflowError: the weights service refused a file.
        """
        missing = {bucket.file for bucket in self._plan.buckets}
        while missing:
            written = await asyncio.to_thread(self._messages.next_report)
            if written is not None:
                missing.discard(written.name)
                yield written
            elif self._is_lost():
                raise SnapshotLostError("a rank was lost while weights were published")

    async def again(self) -> None:
        """Let the ranks send what the weights service lost; `files` gives all again."""
        await asyncio.to_thread(self._messages.tell, Message.AGAIN)

    def committed(self) -> None:
        """Say that the version is committed, when the attempt ends."""
        self._outcome = Message.COMMITTED

    async def end(self) -> None:
        await asyncio.to_thread(self._messages.tell, self._outcome)


class SnapshotWeights:
    """A snapshot that the ranks hold, to be published until the next one is taken."""

    def __init__(
        self,
        plan: BucketPlan,
        store: Store,
        give: Callable[[WriteBuckets], Awaitable[None]],
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """Args:

        plan: of the buckets.
        store: of the ranks' commands.
        give: gives all ranks the same order; raises `SnapshotLostError`.
        is_lost: whether a rank was lost that has a part.
        """
        self.plan = plan
        self._store, self._give, self._is_lost = store, give, is_lost

    @asynccontextmanager
    async def attempt(
        self,
        *,
        version: int = 0,
        epoch: int = 0,
        spool: Path = Path(),
        folder: Path | None = None,
        probe: pb.FolderProbe | None = None,
    ) -> AsyncIterator[Attempt]:
        """Let the ranks write, in the context; see `WriteBuckets`.

        Raises:
            SnapshotLostError: a rank was lost.
        """
        order = WriteBuckets(
            attempt=next(_ATTEMPTS),
            weight_version=version,
            epoch=epoch,
            spool=str(spool),
            folder="" if folder is None else str(folder),
            probe=("", "") if probe is None else (probe.name, probe.content.hex()),
        )
        attempt = Attempt(self.plan, AttemptMessages(self._store, order.attempt), self._is_lost)
        await self._give(order)
        try:
            yield attempt
        finally:
            await attempt.end()
