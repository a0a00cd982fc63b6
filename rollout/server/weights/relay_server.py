"""Relays weights to other rollout servers, also while they are still arriving."""

# ruff: noqa: N802 -- rpcs are named by the contract

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seamflow.durations import seconds_of
from seamflow.errors import SeamflowError
from seamflow.retry import Backoff, retrying
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceServicer

from rollout.server.weights.transport import Incoming, LocalVersion
from rollout.server.weights.weight_cache import WeightCache
from services.chassis import metrics
from services.chassis.errors import Reason, not_found, unavailable
from services.chassis.log import get_logger
from services.lib.weight_files.folder_names import MODEL_NAME, open_regular
from services.lib.weight_files.shard_chunks import OpenShard, keep_freed_memory, send_shards

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

_BEGIN_SECONDS = 5.0
"""How long a child waits for this server to learn of a version."""
_STALL_SECONDS = 10.0
"""How long a child waits for the next bytes, so that two servers cannot wait for each other."""

_RELAYED = metrics.counter(
    "rollout_server", "weight_relayed_bytes_total", "Bytes of shards sent to other servers."
)


class RelayServicer(WeightServiceServicer):
    """Serves `FetchShards` of `WeightService`; its other calls are UNIMPLEMENTED."""

    def __init__(self, cache: WeightCache) -> None:
        self._cache = cache
        keep_freed_memory()

    async def FetchShards(  # type: ignore[override]
        self, request: pb.FetchShardsRequest, context: Any
    ) -> AsyncIterator[bytes]:
        found = await self._found(request)
        shards = send_shards(request, found.manifest.files, partial(open_local, found))
        async with aclosing(shards) as messages:
            async for message, sent in messages:
                _RELAYED.inc(sent)
                yield message

    async def _found(self, request: pb.FetchShardsRequest) -> LocalVersion | Incoming:
        """The version once it is cached or arriving; else NOT_FOUND."""
        if (request.run_id, request.model or MODEL_NAME) != (self._cache.run_id, self._cache.model):
            raise not_found("run", request.run_id)
        try:
            async with asyncio.timeout(_BEGIN_SECONDS):
                return await self._cache.arrival(request.weight_version)
        except TimeoutError as error:
            raise not_found("weight_version", str(request.weight_version)) from error


async def open_local(found: LocalVersion | Incoming, file: pb.WeightFile) -> OpenShard:
    """Open a file of a version; an arriving one can be read up to its verified length."""
    if isinstance(found, Incoming) and file.num_bytes:
        await _available(found, file, 0)
    try:
        # The cache folder, whose files may be links into a shared one.
        opened = open_regular(_path(found, file).resolve())
    except OSError as error:
        message = f"file {file.name!r} cannot be relayed: {error.strerror}"
        raise unavailable(Reason.STORE_UNAVAILABLE, message) from error
    available = partial(_available, found, file) if isinstance(found, Incoming) else None
    return OpenShard(described=file, file=opened, available=available)


def _path(found: LocalVersion | Incoming, file: pb.WeightFile) -> Path:
    if isinstance(found, LocalVersion):
        return found.folder / file.name
    # A complete file is renamed, and so is the folder of a complete version.
    whole = found.folder.with_suffix("") / file.name
    candidates = (found.part(file), found.path(file), whole)
    return next((path for path in candidates if path.exists()), whole)


async def _available(incoming: Incoming, file: pb.WeightFile, offset: int) -> int:
    try:
        async with asyncio.timeout(_STALL_SECONDS):
            return await incoming.beyond(file, offset)
    except TimeoutError as error:
        message = f"file {file.name!r} does not arrive here beyond byte {offset}"
        raise unavailable(Reason.DEPENDENCY_UNAVAILABLE, message) from error


class RelayAnnouncer:
    """Announces this server to the weights service as a relay."""

    def __init__(
        self, stub: WeightServiceAsyncStub, address: str, zone: str, *, run_id: str, model: str
    ) -> None:
        self._stub = stub
        self._request = pb.RequestSourcesRequest(
            run_id=run_id, model=model, address=address, zone=zone
        )

    async def run(self) -> None:
        """Announce until cancelled, three times per lifetime of an announcement."""
        backoff = Backoff()
        while True:
            try:
                response = await retrying(lambda: self._stub.RequestSources(self._request))
                await asyncio.sleep(seconds_of(response.ttl) / 3)
                backoff.reset()
            except SeamflowError as error:
                get_logger().warning("relay_not_announced", error=str(error))
                await backoff.wait()
