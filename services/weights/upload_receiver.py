"""`WeightService.UploadShards`: checks each part and stores it while the next one arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from seamflow.weights.v1 import weight_service_pb2 as pb

from services.chassis.errors import Reason, ServiceError, failed_precondition
from services.chassis.rpc import fields
from services.lib.weight_files.shard_chunks import ShardChunk, keep_freed_memory
from services.weights import validation
from services.weights.keys import Scope
from services.weights.redis_store import RedisStore
from services.weights.version_folders import WeightFolders

_FENCE_SECONDS = 1.0
"""How long a stream stores parts of a version without asking again whether its trainer is stale.
What it stores meanwhile belongs to the content of a file; only a commit makes it a version."""


class UploadReceiver:
    """Stores parts; everything it knows of an upload is on the disk."""

    def __init__(
        self, store: RedisStore, folders: WeightFolders, received: Callable[[float], None]
    ) -> None:
        """`received` is told the length of each part, as sent."""
        self._store, self._folders, self._received = store, folders, received
        keep_freed_memory()

    async def receive(
        self, requests: AsyncIterator[pb.UploadShardsRequest]
    ) -> pb.UploadShardsResponse:
        """RedisStore the parts in order; at most one is stored while the next one arrives.

        Raises:
            ServiceError: as in the contract; the parts before the refused one are stored.
        """
        held: dict[str, int] = {}
        fence = _Fence(self._store)
        storing: asyncio.Task[int] | None = None
        try:
            async for request in requests:
                if storing is not None:
                    await storing
                storing = asyncio.create_task(self._store_part(request, fence, held))
            if storing is not None:
                await storing
        finally:
            if storing is not None:
                # A thread cannot be cancelled; the call ends when nothing is written any more.
                await asyncio.gather(storing, return_exceptions=True)
        files = [pb.UploadedFile(name=name, num_bytes=size) for name, size in held.items()]
        return pb.UploadShardsResponse(files=files)

    async def _store_part(
        self, request: pb.UploadShardsRequest, fence: _Fence, held: dict[str, int]
    ) -> int:
        scope = validation.scope_of(request.run_id, request.model)
        version = fields.positive("weight_version", request.weight_version)
        epoch = fields.positive("epoch", request.epoch)
        validation.check_part(request)
        await fence.check(scope, epoch, version)
        size = await self._folders.receive(
            scope, request.file, request.offset, lambda: _plain(request)
        )
        self._received(len(request.data))
        held[request.file.name] = size
        return size


class _Fence:
    """The fence of one stream."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._passed: tuple[Scope, int, int] | None = None
        self._until = 0.0

    async def check(self, scope: Scope, epoch: int, version: int) -> None:
        """As `RedisStore.fence`, once for each stream and version, and again each second."""
        asked = scope, epoch, version
        if self._passed != asked or time.monotonic() >= self._until:
            await self._store.fence(scope, epoch, version)
            self._passed, self._until = asked, time.monotonic() + _FENCE_SECONDS


def _plain(request: pb.UploadShardsRequest) -> bytes | memoryview:
    """The bytes of the file, checked."""
    data = memoryview(request.data)
    chunk = ShardChunk(
        name=request.file.name,
        offset=request.offset,
        data=data,
        checksum=request.checksum if request.HasField("checksum") else None,
        encoding=request.encoding,
        num_bytes=request.num_bytes if request.encoding else len(data),
    )
    try:
        return chunk.plain()
    except ValueError as error:
        raise _damaged(request, str(error)) from error


def _damaged(request: pb.UploadShardsRequest, what: str) -> ServiceError:
    message = (
        f"file {request.file.name!r}: the part at byte {request.offset} arrived damaged: {what}; "
        "ask GetUpload and send it again"
    )
    return failed_precondition(Reason.CHECKSUM_MISMATCH, message)
