"""Relays weights to other rollout servers, also while they are still arriving."""

# ruff: noqa: N802 -- rpcs are named by the contract

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
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
from services.lib.weight_files.folder_names import MODEL_NAME
from services.lib.weight_files.shard_sender import OpenShard, ShardSender, open_regular

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
        self._sender = ShardSender(LocalShards(cache))

    async def FetchShards(  # type: ignore[override]
        self, request: pb.FetchShardsRequest, context: Any
    ) -> AsyncIterator[bytes]:
        async with aclosing(self._sender.send(request)) as messages:
            async for message, sent in messages:
                _RELAYED.inc(sent)
                yield message


class LocalShards:
    """Adapts the cache to `ShardSource`."""

    def __init__(
        self,
        cache: WeightCache,
        *,
        begin_seconds: float = _BEGIN_SECONDS,
        stall_seconds: float = _STALL_SECONDS,
    ) -> None:
        self._cache = cache
        self._begin_seconds = begin_seconds
        self._stall_seconds = stall_seconds

    @asynccontextmanager
    async def version(
        self, run_id: str, model: str, weight_version: int
    ) -> AsyncIterator[_LocalShardVersion]:
        """Yield the version once it is cached or arriving; NOT_FOUND after `begin_seconds`."""
        if (run_id, model or MODEL_NAME) != (self._cache.run_id, self._cache.model):
            raise not_found("run", run_id)
        try:
            async with asyncio.timeout(self._begin_seconds):
                found = await self._cache.arrival(weight_version)
        except TimeoutError as error:
            raise not_found("weight_version", str(weight_version)) from error
        yield _LocalShardVersion(found, self._stall_seconds)


@dataclass(frozen=True, slots=True)
class _LocalShardVersion:
    """A cached or arriving version."""

    found: LocalVersion | Incoming
    stall_seconds: float

    @property
    def files(self) -> Sequence[pb.WeightFile]:
        return self.found.manifest.files

    async def open(self, file: pb.WeightFile) -> OpenShard:
        """Open a file; an arriving one can be read up to its verified length."""
        if isinstance(self.found, Incoming) and file.num_bytes:
            await self._available(self.found, file, 0)
        try:
            # The cache folder, whose files may be links into a shared one.
            opened = open_regular(self._path(file).resolve())
        except OSError as error:
            message = f"file {file.name!r} cannot be relayed: {error.strerror}"
            raise unavailable(Reason.STORE_UNAVAILABLE, message) from error
        if isinstance(self.found, LocalVersion):
            return OpenShard(described=file, file=opened)
        incoming = self.found
        return OpenShard(
            described=file,
            file=opened,
            available=lambda offset: self._available(incoming, file, offset),
        )

    def _path(self, file: pb.WeightFile) -> Path:
        folder = self.found.folder
        if isinstance(self.found, LocalVersion):
            return folder / file.name
        # A complete file is renamed, and so is the folder of a complete version.
        whole = folder.with_suffix("") / file.name
        candidates = (self.found.part(file), self.found.path(file), whole)
        return next((path for path in candidates if path.exists()), whole)

    async def _available(self, incoming: Incoming, file: pb.WeightFile, offset: int) -> int:
        try:
            async with asyncio.timeout(self.stall_seconds):
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
