"""Chunks of weight files on the wire, without their copies, and how a sender streams them.

Weights are the streams of seamflow that are bound by memory bandwidth. The general encoder and
decoder of protobuf copy `data` four times on its way; these do so once, and give the same bytes
(`tests/unit/services/lib/test_shard_chunks.py` holds them against the generated classes).
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import grpc
import xxhash
from seamflow.weights.v1.weight_service_pb2 import (
    FetchShardsRequest,
    FetchShardsResponse,
    ShardEncoding,
    UploadShardsRequest,
    WeightFile,
)

from services.chassis.errors import (
    Reason,
    ServiceError,
    invalid_argument,
    not_found,
    unavailable,
)

CHUNK_BYTES = 1024 * 1024
"""Bytes of a file in one chunk, at most."""

_KEPT_BYTES = 31 * 1024 * 1024  # glibc learns from blocks of up to 32 MiB
_ZSTD_LEVEL = 1
_DATA_TAG, _UPLOAD_TAG = b"\x1a", b"\x3a"
_VARINT, _FIXED64, _BYTES = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChunk:
    """A chunk as it was received."""

    name: str
    offset: int
    data: memoryview
    """As sent; shares the message's memory."""
    checksum: int | None
    """XXH3-64 of `data`; None: the sender computes none."""
    encoding: ShardEncoding.ValueType
    num_bytes: int
    """Length of the decoded chunk in bytes."""

    @property
    def intact(self) -> bool:
        """Whether `data` matches the checksum; True without one."""
        return self.checksum is None or xxhash.xxh3_64_intdigest(self.data) == self.checksum

    def plain(self) -> bytes | memoryview:
        """The bytes of the file. Raises `ValueError`: the chunk is damaged."""
        if not self.intact:
            raise ValueError("its checksum is not the sender's")
        plain: bytes | memoryview = self.data
        if self.encoding != ShardEncoding.SHARD_ENCODING_UNSPECIFIED:
            plain = decompress(self.data, self.num_bytes)
        if len(plain) != self.num_bytes:
            raise ValueError(f"it decodes to {len(plain)} bytes, not {self.num_bytes}")
        return plain


def encode_chunk(
    name: str,
    offset: int,
    data: bytes,
    encoding: ShardEncoding.ValueType = ShardEncoding.SHARD_ENCODING_UNSPECIFIED,
    num_bytes: int | None = None,
) -> bytes:
    """Encode a `FetchShardsResponse`; `num_bytes`: decoded length of `data`, by default its own."""
    head = FetchShardsResponse(
        name=name,
        offset=offset,
        checksum=xxhash.xxh3_64_intdigest(data),
        encoding=encoding,
        num_bytes=len(data) if num_bytes is None else num_bytes,
    )
    return b"".join((head.SerializeToString(), _DATA_TAG, _varint(len(data)), data))


def encode_upload(head: UploadShardsRequest, data: bytes) -> bytes:
    """Encode `head`, which has no `data`, with `data` as sent and its checksum."""
    head.checksum = xxhash.xxh3_64_intdigest(data)
    if not data:
        return head.SerializeToString()
    return b"".join((head.SerializeToString(), _UPLOAD_TAG, _varint(len(data)), data))


def decode_chunk(message: bytes) -> ShardChunk:
    """Decode a `FetchShardsResponse`.

    Raises:
        ValueError: the bytes are not a response.
    """
    view, position = memoryview(message), 0
    numbers: dict[int, int] = {}
    texts: dict[int, memoryview] = {}
    while position < len(view):
        key, position = _read_varint(view, position)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            numbers[field], position = _read_varint(view, position)
        elif kind == _FIXED64:
            numbers[field] = int.from_bytes(_slice(view, position, 8), "little")
            position += 8
        elif kind == _BYTES:
            size, position = _read_varint(view, position)
            texts[field] = _slice(view, position, size)
            position += size
        else:
            raise ValueError(f"byte {position} of a chunk: wire type {kind}")
    data = texts.get(3, view[:0])
    return ShardChunk(
        name=str(texts.get(1, b""), "utf-8"),
        offset=numbers.get(2, 0),
        data=data,
        checksum=numbers.get(4),
        encoding=ShardEncoding.ValueType(numbers.get(5, 0)),
        num_bytes=numbers.get(6, len(data)),
    )


def smallest(plain: bytes, *, compressed: bool) -> tuple[ShardEncoding.ValueType, bytes]:
    """What is sent of `plain`: a Zstandard frame, if `compressed` and if that is smaller."""
    if compressed and len(data := compress(plain)) < len(plain):
        return ShardEncoding.SHARD_ENCODING_ZSTD, data
    return ShardEncoding.SHARD_ENCODING_UNSPECIFIED, plain


def compress(data: bytes) -> bytes:
    """One Zstandard frame."""
    import zstandard  # only compression needs it

    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data)


def decompress(data: memoryview, max_bytes: int) -> bytes:
    """The content of a frame, at most `max_bytes`.

    Raises:
        ValueError: it is not a frame, or its content is longer.
    """
    import zstandard

    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= max_bytes:
            raise ValueError(f"a frame of {size} bytes instead of at most {max_bytes}")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def keep_freed_memory() -> None:
    """Make the C library reuse the memory of one chunk for the next.

    glibc gives blocks as large as a chunk back to the kernel, which has to clear their pages when
    they are asked for again: a third of what a stream costs. glibc stops that for all blocks
    smaller than the largest one it saw freed (mallopt(3), M_MMAP_THRESHOLD), and then keeps up to
    twice that size. Other C libraries are not changed by this.
    """
    bytes(_KEPT_BYTES)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    number = shift = 0
    while shift < 64 and position < len(view):
        byte = view[position]
        number |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return number, position
        shift += 7
    raise ValueError(f"byte {position} of a chunk: a number without an end")


def _slice(view: memoryview, position: int, size: int) -> memoryview:
    part = view[position : position + size]
    if len(part) != size:
        raise ValueError(f"byte {position} of a chunk: {size} bytes expected, {len(part)} left")
    return part


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
