"""Validation of requests, by INVALID_ARGUMENT; strict, because names become paths."""

from __future__ import annotations

import re
from collections.abc import Sequence

from seamflow.weights.v1.weight_service_pb2 import (
    FolderProbe,
    ShardEncoding,
    UploadShardsRequest,
    WeightFile,
)

from services.chassis.errors import invalid_argument
from services.chassis.rpc.fields import not_negative
from services.lib.weight_files.folder_names import CONTENT_BYTES, MODEL_NAME, PROBE_NAME
from services.lib.weight_files.shard_chunks import CHUNK_BYTES
from services.weights.keys import Scope

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
_NAME_CURE = "use 1 to 128 of A-Z a-z 0-9 . _ -, not beginning with . or -"
_ZONE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_FILES = 10_000
_UPLOADED = (
    ShardEncoding.SHARD_ENCODING_UNSPECIFIED,
    ShardEncoding.SHARD_ENCODING_ZSTD,
)


def scope_of(run_id: str, model: str) -> Scope:
    """The scope of a request; an empty model is "policy"."""
    model = model or MODEL_NAME
    return Scope(run_id=_named("run_id", run_id), model=_named("model", model))


def zone(name: str) -> str:
    if name and not _ZONE.fullmatch(name):
        cure = "use at most 64 of A-Z a-z 0-9 . _ -, or none; zone of [rollout_server]"
        raise invalid_argument("zone", name[:80], cure)
    return name


def check_files(files: Sequence[WeightFile]) -> None:
    """Check that each file has a unique plain name, a size and a digest."""
    if not 1 <= len(files) <= _MAX_FILES:
        cure = f"name every file of the version, 1 to {_MAX_FILES}"
        raise invalid_argument("files", f"{len(files)} files", cure)
    seen = set[str]()
    for index, file in enumerate(files):
        field = f"files[{index}]"
        check_file(field, file)
        if file.name in seen:
            raise invalid_argument(f"{field}.name", file.name, "name each file once")
        seen.add(file.name)


def check_file(field: str, file: WeightFile) -> None:
    """Check that a file has a plain name, a size and a digest."""
    _named(f"{field}.name", file.name)
    not_negative(f"{field}.num_bytes", file.num_bytes)
    if not _DIGEST.fullmatch(file.sha256):
        cure = "give the SHA-256 as 64 lower-case hex digits"
        raise invalid_argument(f"{field}.sha256", file.sha256[:80], cure)


def check_part(request: UploadShardsRequest) -> None:
    """Check that a part of a file has a size that its encoding may have, and lies in the file."""
    check_file("file", request.file)
    if len(request.data) > CHUNK_BYTES:
        cure = f"send parts of at most {CHUNK_BYTES} bytes"
        raise invalid_argument("data", f"{len(request.data)} bytes", cure)
    if request.encoding not in _UPLOADED:
        cure = "send the bytes of the file (0), or one Zstandard frame (1)"
        raise invalid_argument("encoding", request.encoding, cure)
    size = request.num_bytes if request.encoding else len(request.data)
    if not 0 <= size <= CHUNK_BYTES:
        raise invalid_argument("num_bytes", size, f"it must be 0 to {CHUNK_BYTES}")
    if not 0 <= request.offset <= request.file.num_bytes - size:
        cure = f"the part of {size} bytes must lie within file {request.file.name!r}"
        raise invalid_argument("offset", request.offset, f"{cure} of {request.file.num_bytes}")


def check_probe(probe: FolderProbe) -> None:
    """Check the name and the length of a caller's probe."""
    if not PROBE_NAME.fullmatch(probe.name):
        cure = 'use ".probe-" and 32 lower-case hex digits'
        raise invalid_argument("written.name", probe.name[:64], cure)
    if not 1 <= len(probe.content) <= CONTENT_BYTES:
        cure = f"it must have 1 to {CONTENT_BYTES} bytes"
        raise invalid_argument("written.content", f"{len(probe.content)} bytes", cure)


def _named(field: str, value: str) -> str:
    if not _NAME.fullmatch(value):
        raise invalid_argument(field, value[:64], _NAME_CURE)
    return value
