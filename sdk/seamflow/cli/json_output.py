"""Snapshot and findings as JSON, every field present: for programs that read the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from seamflow.errors import SeamflowError


def plain(value: Any) -> Any:
    """What `json.dumps` takes: messages and dataclasses become objects, enums their names."""
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        fields = value.DESCRIPTOR.fields
        return {field.name: _field(value, field.name, field.enum_type) for field in fields}
    if isinstance(value, SeamflowError):
        return {"error": type(value).__name__, "message": str(value), "reason": value.reason}
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def _field(message: Message, name: str, enum: Any) -> Any:
    value = getattr(message, name)
    if isinstance(value, Message):
        return plain(value) if message.HasField(name) else None
    if enum is not None and isinstance(value, int):
        known = enum.values_by_number.get(value)
        return known.name if known else value
    return plain(value)
