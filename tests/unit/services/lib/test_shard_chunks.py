"""The chunk codec is the generated class's, only faster."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from seamflow.weights.v1.weight_service_pb2 import (
    FetchShardsResponse,
    ShardEncoding,
    UploadShardsRequest,
)

from services.lib.weight_files.shard_chunks import (
    compress,
    decode_chunk,
    decompress,
    encode_chunk,
    encode_upload,
)

names = st.text(max_size=40)


offsets = st.integers(0, 2**63 - 1)


@given(names, offsets, st.binary(max_size=300), st.sampled_from([0, 1, 2]), st.integers(0, 2**40))
def test_protobuf_reads_encoded_chunks(
    name: str, offset: int, data: bytes, encoding: ShardEncoding.ValueType, num_bytes: int
) -> None:
    """Other languages read our chunks by the contract alone."""
    message = encode_chunk(name, offset, data, encoding, num_bytes)
    read = FetchShardsResponse.FromString(message)
    assert (read.name, read.offset, read.data) == (name, offset, data)
    assert (read.encoding, read.num_bytes) == (encoding, num_bytes)
    assert decode_chunk(message).checksum == read.checksum


@given(names, offsets, st.binary(max_size=300), st.sampled_from([0, 1]))
def test_protobuf_reads_encoded_uploads(
    name: str, offset: int, data: bytes, encoding: ShardEncoding.ValueType
) -> None:
    """The same message as the generated class makes, with the checksum of its data."""
    head = UploadShardsRequest(run_id="run", weight_version=3, epoch=7, encoding=encoding)
    head.file.name, head.offset = name, offset
    read = UploadShardsRequest.FromString(encode_upload(head, data))
    checksum = xxhash.xxh3_64_intdigest(data)
    assert (read.data, read.checksum) == (data, checksum)
    read.ClearField("data")
    assert read == head


@given(names, offsets, st.binary(max_size=300), st.none() | st.integers(0, 2**64 - 1))
def test_chunks_of_protobuf_are_decoded(
    name: str, offset: int, data: bytes, checksum: int | None
) -> None:
    """A sender that uses the generated class is understood, also one of 0.1.0."""
    message = FetchShardsResponse(name=name, offset=offset, data=data, checksum=checksum)
    chunk = decode_chunk(message.SerializeToString())
    assert (chunk.name, chunk.offset, bytes(chunk.data)) == (name, offset, data)
    assert (chunk.checksum, chunk.num_bytes) == (checksum, len(data))


@given(st.binary(min_size=1, max_size=200), st.integers(0, 10_000))
def test_no_flipped_bit_passes(data: bytes, bit: int) -> None:
    """Wherever in the data a bit flips, the chunk is not intact; untouched it is."""
    message = bytearray(encode_chunk("m", 0, data))
    assert decode_chunk(bytes(message)).intact
    position = len(message) - 1 - bit % len(data)
    message[position] ^= 1 << bit % 8
    assert not decode_chunk(bytes(message)).intact


@given(st.binary(max_size=60))
def test_bytes_that_are_no_chunk_are_a_value_error(garbage: bytes) -> None:
    """Nothing from the wire raises anything else."""
    try:
        decode_chunk(garbage)
    except ValueError:
        return


def test_a_truncated_chunk_is_a_value_error() -> None:
    """A chunk whose end is missing is not taken for a shorter one."""
    message = encode_chunk("m", 0, b"12345")
    with pytest.raises(ValueError, match="5 bytes expected, 4 left"):
        decode_chunk(message[:-1])


def test_an_oversized_frame_is_an_error() -> None:
    """The declared size of a frame is checked before it is decompressed."""
    bomb = compress(bytes(1_000_000))
    with pytest.raises(ValueError, match="1000000 bytes"):
        decompress(memoryview(bomb), 1000)
    assert len(decompress(memoryview(bomb), 1_000_000)) == 1_000_000
