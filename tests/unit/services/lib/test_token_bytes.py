"""Token arrays as bytes: little-endian, four bytes for each token."""

from __future__ import annotations

import struct

import pytest

from services.lib.token_bytes import (
    BYTES_PER_TOKEN,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)

IDS = [0, 1, 258, 2**31 - 1]
LOGPROBS = [0.0, -0.5, -80.0]


def test_they_are_little_endian() -> None:
    """Whatever the machine: another one reads them."""
    assert pack_ids(IDS) == struct.pack("<4i", *IDS)
    assert pack_logprobs(LOGPROBS) == struct.pack("<3f", *LOGPROBS)
    assert len(pack_ids(IDS)) == BYTES_PER_TOKEN * len(IDS)


def test_they_are_read_back() -> None:
    """Log-probs as float32."""
    assert unpack_ids(pack_ids(IDS)) == IDS
    assert unpack_logprobs(pack_logprobs(LOGPROBS)) == LOGPROBS
    assert unpack_logprobs(pack_logprobs([-0.1])) == pytest.approx([-0.1], rel=1e-6)


def test_a_part_of_a_token_is_an_error() -> None:
    """Bytes that were cut are noticed."""
    with pytest.raises(ValueError, match="bytes length"):
        unpack_ids(pack_ids(IDS)[:-1])


def test_an_id_beyond_int32_is_an_error() -> None:
    """It would be another id."""
    with pytest.raises(OverflowError):
        pack_ids([2**31])
