"""Records as JSON, for the store.

Readers ignore unknown fields and use defaults for missing ones, so records of older and newer
schedulers can be read.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

from scheduler.model.lending_state import LendingState
from scheduler.model.records import AllocationEvent, Gang, GangKey, Node, RunPolicy
from scheduler.model.stage_balance import StageBalance

_reader: Any = cache(TypeAdapter)
Record = TypeVar("Record", Node, Gang, RunPolicy, LendingState, StageBalance, AllocationEvent)


def encode(record: Node | Gang | RunPolicy | LendingState | StageBalance | AllocationEvent) -> str:
    """One line of JSON."""
    content = asdict(record)
    for node in (content, content.get("node") or {}):
        node.pop("report", None)  # kept in memory only
    return json.dumps(content, separators=(",", ":"))


def decode(kind: type[Record], text: bytes) -> Record:
    """Decode a record of `encode`."""
    found: Record = _reader(kind).validate_python(json.loads(text))
    return found


def encode_key(key: GangKey) -> str:
    """Encode a gang's key, with any characters."""
    return json.dumps(key)


def decode_key(text: bytes) -> GangKey:
    """Decode a key of `encode_key`."""
    run_id, gang_id = json.loads(text)
    return run_id, gang_id
