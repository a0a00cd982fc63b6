"""Shards over gRPC: checked chunk by chunk, resumed where they stopped, in bounded memory.

A chunk is verified (XXH3-64) and decoded. What has arrived is written and hashed (SHA-256) in a
thread, at most four chunks together while the next four arrive, so a stream holds eight chunks and
gRPC's window in memory. On a slow link each chunk is written, and relayed, as it comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import grpc.aio
from seamflow.errors import SeamflowError, UnavailableError, decode
from seamflow.retry import Backoff, retrying
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2 import (
    FetchShardsRequest,
    Manifest,
    ShardEncoding,
    WeightFile,
)
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from rollout.server.weights.transport import (
    DamagedChunk,
    DamagedFile,
    Incoming,
    SourceLost,
    TransferError,
    for_each_missing,
)
from rollout.server.weights.transports import TransportContext
from services.chassis import metrics
from services.chassis.log import get_logger
from services.lib.weight_files.shard_chunks import (
    CHUNK_BYTES,
    ShardChunk,
    decode_chunk,
    keep_freed_memory,
)

_METHOD = "/seamflow.weights.v1.WeightService/FetchShards"
_DAMAGED_TRIES = 3
_TOGETHER = 4
"""Most chunks that are written together while the next ones arrive."""

_RECEIVED = metrics.counter(
    "rollout_server",
    "weight_received_bytes_total",
    "Bytes of weights received, by transport.",
    ("transport",),
)
_DECODED = metrics.counter(
    "rollout_server",
    "weight_decoded_bytes_total",
    "Bytes of weights that the received ones stand for, by transport.",
    ("transport",),
)
_DAMAGED = metrics.counter(
    "rollout_server", "weight_chunks_refused_total", "Chunks that arrived damaged."
)


class ShardStream:
    """Fetches all files from the weights service, a few concurrently."""

    def __init__(self, context: TransportContext) -> None:
        self._receiver = ShardReceiver(
            "shard_stream", compressed=bool(context.config.weight_encodings)
        )
        self._channel = context.weights
        self._streams = context.config.weight_streams

    async def fetch(self, incoming: Incoming) -> None:
        """Fetch all missing files; retries an unavailable weights service until the deadline."""
        await for_each_missing(
            incoming, self._streams, lambda file: self._receive_when_available(incoming, file)
        )

    async def _receive_when_available(self, incoming: Incoming, file: WeightFile) -> None:
        backoff = Backoff()
        while True:
            try:
                return await self._receiver.receive(self._channel, incoming, file)
            except UnavailableError as error:
                get_logger().warning("weights_service_unavailable", error=str(error))
            await backoff.wait()


@dataclass(slots=True)
class ShardReceiver:
    """Receives single files from any sender."""

    transport: str
    """Name of the transport, for errors and metrics."""
    compressed: bool = False
    """Whether it asks for Zstandard frames."""

    def __post_init__(self) -> None:
        keep_freed_memory()

    async def receive(
        self, channel: grpc.aio.Channel, incoming: Incoming, file: WeightFile
    ) -> None:
        """Continue `file` from its verified prefix and complete it.

        Raises `SeamflowError` for an error of the sender, `DamagedChunk` when the same chunk was
        damaged three times, `DamagedFile` when the complete file differs from the manifest.
        """
        damaged: Counter[int | None] = Counter()
        while True:
            try:
                return await self._receive(channel, incoming, file)
            except grpc.aio.AioRpcError as error:
                raise decode(error) from error
            except DamagedChunk as error:
                _DAMAGED.inc()
                get_logger().warning("weight_chunk_refused", error=str(error))
                damaged[error.chunk] += 1
                if damaged[error.chunk] == _DAMAGED_TRIES:
                    raise

    async def _receive(
        self, channel: grpc.aio.Channel, incoming: Incoming, file: WeightFile
    ) -> None:
        size = incoming.verified(file)
        if size < file.num_bytes or not size:  # else it was complete before a restart
            size = await self._append(channel, incoming, file)
        if size != file.num_bytes:
            what = f"received {size} bytes, the manifest has {file.num_bytes}"
            raise self._damaged_file(what, incoming, file)
        if await asyncio.to_thread(_digest, incoming, file) != file.sha256:
            raise self._damaged_file("its SHA-256 is not the manifest's", incoming, file)
        incoming.complete(file)

    async def _append(self, channel: grpc.aio.Channel, incoming: Incoming, file: WeightFile) -> int:
        """Write and hash the missing bytes of `file`; returns its length."""
        start = incoming.verified(file)
        incoming.part(file).touch()
        with incoming.part(file).open("r+b", buffering=0) as opened:
            opened.truncate(start)  # an interrupted write may have left unverified bytes
            writing = _Writing(incoming, file, opened.fileno())
            try:
                if start < file.num_bytes:
                    async with aclosing(self._chunks(channel, incoming, file, start)) as chunks:
                        async for chunk in chunks:
                            await writing.add(await self._plain(chunk, file))
            finally:
                await writing.finish()
        return writing.size

    async def _chunks(
        self, channel: grpc.aio.Channel, incoming: Incoming, file: WeightFile, start: int
    ) -> AsyncGenerator[ShardChunk, None]:
        """The chunks of `file` from `start`, each verified and in order."""
        call = channel.unary_stream(
            _METHOD,
            request_serializer=FetchShardsRequest.SerializeToString,
            response_deserializer=bytes,
        )(self._request(incoming, file, start))
        received, position, num_received = _RECEIVED.labels(self.transport), start, 0
        try:
            async for message in call:
                received.inc(len(message))
                incoming.received_bytes += len(message)
                num_received += len(message)
                chunk = self._checked(message, file, position)
                yield chunk
                position += chunk.num_bytes
        finally:
            call.cancel()
            _DECODED.labels(self.transport).inc(position - start)
        if self.compressed and position - start >= CHUNK_BYTES:
            share = round(num_received / (position - start), 3)
            get_logger().info("weights_encoded", file=file.name, share_of_bytes=share)

    def _request(self, incoming: Incoming, file: WeightFile, start: int) -> FetchShardsRequest:
        manifest: Manifest = incoming.manifest
        accepted = [ShardEncoding.SHARD_ENCODING_ZSTD] if self.compressed else []
        return FetchShardsRequest(
            run_id=manifest.run_id,
            model=manifest.model,
            weight_version=manifest.weight_version,
            names=[file.name],
            offset=start,
            accepted_encodings=accepted,
        )

    def _checked(self, message: bytes, file: WeightFile, position: int) -> ShardChunk:
        try:
            chunk = decode_chunk(message)
        except ValueError as error:
            raise self._damaged(str(error), file, position) from error
        if chunk.name != file.name or chunk.offset != position:
            raise self._damaged(f"received {chunk.name} at {chunk.offset}", file, position)
        room = min(CHUNK_BYTES, file.num_bytes - position)
        if not 0 <= chunk.num_bytes <= room:
            what = f"it decodes to {chunk.num_bytes} bytes, the manifest leaves {room}"
            raise self._damaged(what, file, position)
        return chunk

    async def _plain(self, chunk: ShardChunk, file: WeightFile) -> bytes | memoryview:
        is_plain = chunk.encoding == ShardEncoding.SHARD_ENCODING_UNSPECIFIED
        is_accepted = self.compressed and chunk.encoding == ShardEncoding.SHARD_ENCODING_ZSTD
        if not (is_plain or is_accepted):
            raise self._damaged(f"encoding {chunk.encoding} was not accepted", file, chunk.offset)
        try:
            return chunk.plain() if is_plain else await asyncio.to_thread(chunk.plain)
        except ValueError as error:
            raise self._damaged(str(error), file, chunk.offset) from error

    def _damaged(self, what: str, file: WeightFile, offset: int) -> DamagedChunk:
        return DamagedChunk(
            what,
            transport=self.transport,
            cure="it is fetched again; if that recurs, check the sender's memory and the network",
            file=file.name,
            chunk=offset // CHUNK_BYTES,
            offset=offset,
        )

    def _damaged_file(self, what: str, incoming: Incoming, file: WeightFile) -> DamagedFile:
        incoming.drop(file)
        cure = "it is fetched again from its first byte"
        return DamagedFile(what, transport=self.transport, cure=cure, file=file.name)


class _Writing:
    """Writes and hashes chunks in a thread, some together, while the next ones arrive."""

    def __init__(self, incoming: Incoming, file: WeightFile, descriptor: int) -> None:
        self.size = incoming.verified(file)
        self._incoming, self._file, self._descriptor = incoming, file, descriptor
        self._waiting: list[bytes | memoryview] = []
        self._writing: asyncio.Task[None] | None = None
        self._is_over = False

    async def add(self, plain: bytes | memoryview) -> None:
        """Write a chunk, perhaps later. Raises the failure of one before."""
        self._waiting.append(plain)
        is_free = self._writing is None or self._writing.done()
        if is_free or len(self._waiting) == _TOGETHER:
            await self._next()

    async def finish(self) -> None:
        """Wait until all is written. Raises the failure of a write."""
        try:
            while self._writing is not None:
                await self._next()
        finally:
            self._is_over = True

    async def _next(self) -> None:
        """Begin to write what waits, once the write before has ended."""
        if (writing := self._writing) is not None:
            # Not awaited itself: it would be cancelled with this call, but its thread goes on.
            await asyncio.wait({writing})
            self._writing = None
            writing.result()
        if self._waiting:
            chunks, self._waiting = self._waiting, []
            self._writing = asyncio.create_task(self._write(chunks))

    async def _write(self, chunks: list[bytes | memoryview]) -> None:
        size = await asyncio.to_thread(self._take, chunks)
        if not self._is_over:  # else it was cancelled twice: perhaps another one writes by now
            self.size = size
            self._incoming.advance(self._file, size)

    def _take(self, chunks: list[bytes | memoryview]) -> int:
        size, path = self.size, self._incoming.part(self._file)
        for plain in chunks:
            self._incoming.checked.append(path, self._descriptor, size, plain)
            size += len(plain)
        return size


def _digest(incoming: Incoming, file: WeightFile) -> str:
    with incoming.part(file).open("rb") as opened:
        return incoming.checked.digest(opened)


_NAME = "relay"
_SOURCES = 4
"""Servers that are tried for a file, one after the other."""


class Relay:
    """Fetches each file from the source that the weights service names.

    If a source fails, the service names another one, which continues from the verified prefix: in
    a zone, another leader. After `_SOURCES` of them the file is left to the next transport.
    """

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._stub = async_stub(WeightServiceStub, context.weights)
        self._receiver = ShardReceiver(_NAME, bool(context.config.weight_encodings))
        self._address = context.config.weight_relay_address or ""
        self._zone = context.config.zone

    async def fetch(self, incoming: Incoming) -> None:
        """Fetch all missing files; raises the first `TransferError` after trying each."""
        sources = await self._sources(incoming.manifest)
        failures: list[TransferError] = []

        def source(file: pb.WeightFile) -> str:
            return sources.get(file.name, "")

        async def fetch_file(file: pb.WeightFile) -> None:
            try:
                await self._fetch_from_any(incoming, file, source(file))
            except TransferError as error:
                failures.append(error)

        # A leader waits for no other before it fetches its own files: the link is never idle.
        await for_each_missing(incoming, self._context.config.weight_streams, fetch_file, source)
        if failures:
            raise failures[0]

    async def _fetch_from_any(self, incoming: Incoming, file: pb.WeightFile, source: str) -> None:
        for number in range(_SOURCES):
            try:
                await self._fetch_file(incoming, file, source)
                return
            except SourceLost:
                # From the service itself the next transport continues.
                if not source or number == _SOURCES - 1:
                    raise
            source = (await self._sources(incoming.manifest, lost=source)).get(file.name, "")

    async def _sources(self, manifest: pb.Manifest, lost: str = "") -> dict[str, str]:
        request = pb.RequestSourcesRequest(
            run_id=manifest.run_id,
            model=manifest.model,
            weight_version=manifest.weight_version,
            address=self._address,
            zone=self._zone,
            lost_address=lost,
        )
        response = await retrying(lambda: self._stub.RequestSources(request))
        return {source.name: source.address for source in response.files}

    async def _fetch_file(self, incoming: Incoming, file: pb.WeightFile, address: str) -> None:
        context = self._context
        channel = context.connect(address) if address else context.weights
        try:
            await self._receiver.receive(channel, incoming, file)
        except SeamflowError as error:
            what = f"{address or 'the weights service'}: {error}"
            cure = "the next transport continues from here"
            offset = incoming.verified(file)
            raise SourceLost(
                what, transport=_NAME, cure=cure, file=file.name, offset=offset
            ) from error
