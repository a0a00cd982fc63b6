"""Records as JSON, for the store. Readers ignore fields they do not know."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any, TypeVar

from scheduler.records import (
    AllocationEvent,
    Assignment,
    EventKind,
    Gang,
    GangKey,
    Node,
    NodeState,
    Worker,
)

__all__ = [
    "decode_event",
    "decode_gang",
    "decode_node",
    "encode",
    "encode_key",
]

Record = TypeVar("Record")


def encode(record: Node | Gang | AllocationEvent) -> str:
    """One line of JSON."""
    return json.dumps(asdict(record), separators=(",", ":"))


def encode_key(key: GangKey) -> str:
    """A gang's name, whatever characters it holds."""
    return json.dumps(key)


def decode_gang(text: bytes) -> Gang:
    """The gang that `encode` wrote."""
    return Gang(**_known(Gang, json.loads(text)))


def decode_node(text: bytes) -> Node:
    """The node that `encode` wrote."""
    return _node(json.loads(text))


def decode_event(text: bytes) -> AllocationEvent:
    """The event that `encode` wrote."""
    content = json.loads(text)
    content |= {"node": _node(content["node"]), "kind": EventKind(content["kind"])}
    return AllocationEvent(**_known(AllocationEvent, content))


def _node(content: dict[str, Any]) -> Node:
    content |= {
        "capability_tags": tuple(content["capability_tags"]),
        "workers": tuple(Worker(**_known(Worker, entry)) for entry in content["workers"]),
        "assignment": Assignment(**_known(Assignment, content["assignment"])),
        "state": NodeState(content["state"]),
    }
    return Node(**_known(Node, content))


def _known(record: Any, content: dict[str, Any]) -> dict[str, Any]:
    names = {entry.name for entry in fields(record)}
    return {name: value for name, value in content.items() if name in names}
