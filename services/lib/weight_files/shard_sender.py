"""`WeightService.FetchShards`, served by the weights service and relaying rollout servers.

A shard may still be arriving: its verified part is forwarded while the rest is received.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import grpc
from seamflow.weights.v1.weight_service_pb2 import FetchShardsRequest, ShardEncoding, WeightFile

from services.chassis.errors import (
    Reason,
    ServiceError,
    invalid_argument,
    not_found,
    unavailable,
)
from services.lib.weight_files.shard_chunks import (
    CHUNK_BYTES,
    encode_chunk,
    smallest,
)

_AHEAD = 4
"""Chunks read ahead while earlier ones are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenShard:
    """One file of a version, open for reading."""

    described: WeightFile
    """As in the manifest."""
    file: io.BufferedReader
    """Its bytes; closed by the sender."""
    available: Callable[[int], Awaitable[int]] | None = None
    """Waits for bytes beyond an offset and returns the number of available bytes; None: the file is
    complete."""

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes at `offset`.

        Raises:
            ServiceError: DATA_LOSS when the file is shorter, UNAVAILABLE when the disk fails.
        """
        where = f"file {self.described.name!r}"
        try:
            self.file.seek(offset)
            data = self.file.read(size)
        except OSError as error:
            message = f"cannot read {where}: {error.strerror}"
            raise unavailable(Reason.STORE_UNAVAILABLE, message) from error
        if len(data) < size:
            total = self.described.num_bytes
            raise _lost(f"{where} ends at byte {offset + len(data)} of {total}")
        return data


async def send_shards(
    request: FetchShardsRequest,
    files: Sequence[WeightFile],
    open_shard: Callable[[WeightFile], Awaitable[OpenShard]],
) -> AsyncGenerator[tuple[bytes, int], None]:
    """Yield encoded responses, which no interceptor encodes again, and the length of their data.

    At most four chunks are read ahead: a slow reader slows the disk reads.

    Args:
        request: names some of the files.
        files: all of the version, which is protected from deletion meanwhile.
        open_shard: opens one of them, or raises `ServiceError`.
    """
    compressed = ShardEncoding.SHARD_ENCODING_ZSTD in request.accepted_encodings
    for file in _chosen(files, request):
        shard = await open_shard(file)
        with shard.file:
            async with aclosing(_Stream(shard, compressed).messages(request.offset)) as messages:
                async for message in messages:
                    yield message


@dataclass(frozen=True, slots=True)
class _Stream:
    shard: OpenShard
    compressed: bool
    """Whether the receiver takes Zstandard frames."""

    async def messages(self, offset: int) -> AsyncGenerator[tuple[bytes, int], None]:
        ahead = asyncio.ensure_future(self._next(offset))
        try:
            while True:
                messages, offset = await ahead
                last = offset >= self.shard.described.num_bytes
                if not last:
                    ahead = asyncio.ensure_future(self._next(offset))
                for message in messages:
                    yield message
                if last:
                    return
        finally:
            ahead.cancel()

    async def _next(self, offset: int) -> tuple[list[tuple[bytes, int]], int]:
        end = self.shard.described.num_bytes
        if self.shard.available is not None and offset < end:
            end = min(end, await self.shard.available(offset))
        end = min(end, offset + _AHEAD * CHUNK_BYTES)
        return await asyncio.to_thread(self._all_encoded, offset, end), end

    def _all_encoded(self, offset: int, end: int) -> list[tuple[bytes, int]]:
        if offset == end:
            return [self._encoded(offset, 0)]
        return [
            self._encoded(start, min(CHUNK_BYTES, end - start))
            for start in range(offset, end, CHUNK_BYTES)
        ]

    def _encoded(self, offset: int, size: int) -> tuple[bytes, int]:
        name, plain = self.shard.described.name, self.shard.read(offset, size)
        encoding, data = smallest(plain, compressed=self.compressed)
        return encode_chunk(name, offset, data, encoding, size), len(data)


def _chosen(files: Sequence[WeightFile], request: FetchShardsRequest) -> list[WeightFile]:
    """The requested files, in the manifest's order; no names: all."""
    names = set(request.names)
    if unknown := names - {file.name for file in files}:
        raise not_found("file", min(unknown))
    chosen = [file for file in files if not names or file.name in names]
    if request.offset and len(names) != 1:
        cure = "an offset belongs to one file: give its name alone"
        raise invalid_argument("names", sorted(names), cure)
    if not 0 <= request.offset <= min(file.num_bytes for file in chosen):
        raise invalid_argument("offset", request.offset, "it must lie within the file")
    return chosen


def _lost(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.DATA_LOSS, Reason.INCOMPLETE_PUBLISH, message)
