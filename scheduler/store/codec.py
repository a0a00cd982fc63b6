"""Records as JSON, for the store.

Readers ignore fields they do not know, and missing ones have their defaults: what an older or newer
scheduler wrote can be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from scheduler.model.lending import Lending, Mean, Outlook
from scheduler.model.records import (
    AllocationEvent,
    Assignment,
    EventKind,
    Gang,
    GangKey,
    Hardware,
    Node,
    NodeState,
    RunPolicy,
    Worker,
)
from scheduler.model.split_advice import Advice, Balance, Batch, Team

__all__ = [
    "decode_balance",
    "decode_event",
    "decode_gang",
    "decode_key",
    "decode_lending",
    "decode_node",
    "decode_run_policy",
    "encode",
    "encode_key",
]

Record = TypeVar("Record")
_Readers = Mapping[str, Callable[[Any], Any]]


def encode(record: Node | Gang | RunPolicy | Lending | Balance | AllocationEvent) -> str:
    """One line of JSON."""
    content = asdict(record)
    for node in (content, content.get("node") or {}):
        node.pop("report", None)  # as old as the scheduler's memory, no older
    return json.dumps(content, separators=(",", ":"))


def encode_key(key: GangKey) -> str:
    """A gang's name, whatever characters it holds."""
    return json.dumps(key)


def decode_key(text: bytes) -> GangKey:
    """The key that `encode_key` wrote."""
    run_id, gang_id = json.loads(text)
    return run_id, gang_id


def decode_gang(text: bytes) -> Gang:
    """The gang that `encode` wrote."""
    return _record(Gang, json.loads(text))


def decode_node(text: bytes) -> Node:
    """The node that `encode` wrote."""
    return _node(json.loads(text))


def decode_run_policy(text: bytes) -> RunPolicy:
    """The policy that `encode` wrote."""
    return _record(RunPolicy, json.loads(text))


def decode_lending(text: bytes) -> Lending:
    """The measurements that `encode` wrote."""
    readers: _Readers = {
        "dedicated": _reader(Mean),
        "full": _reader(Mean),
        "generation": _reader(Mean),
        "share": _reader(Mean),
        "outlook": _reader(Outlook),
    }
    return _record(Lending, json.loads(text), readers)


def decode_balance(text: bytes) -> Balance:
    """The measurements that `encode` wrote."""
    readers: _Readers = {
        "advice": Advice,
        "batches": lambda entries: tuple(
            _record(Batch, entry, {"team": _reader(Team)}) for entry in entries
        ),
        "team": _reader(Team),
    }
    return _record(Balance, json.loads(text), readers)


def decode_event(text: bytes) -> AllocationEvent:
    """The event that `encode` wrote."""
    return _record(AllocationEvent, json.loads(text), {"node": _node, "kind": EventKind})


def _node(content: dict[str, Any]) -> Node:
    readers: _Readers = {
        "capability_tags": tuple,
        "workers": lambda entries: tuple(_record(Worker, entry) for entry in entries),
        "assignment": _reader(Assignment),
        "hardware": _reader(Hardware),
        "state": NodeState,
    }
    return _record(Node, content, readers)


def _reader(record: type[Record]) -> Callable[[dict[str, Any]], Record]:
    return lambda content: _record(record, content)


def _record(
    record: type[Record],
    content: dict[str, Any],
    readers: _Readers | None = None,
) -> Record:
    """`content` as a `record`; a part that is not null goes through its reader."""
    names = {entry.name for entry in fields(record)}  # type: ignore[arg-type] # all are dataclasses
    values = {name: value for name, value in content.items() if name in names}
    for name, read in (readers or {}).items():
        if values.get(name) is not None:
            values[name] = read(values[name])
    return record(**values)
