"""Records as JSON, for the store.

Readers ignore unknown fields and use defaults for missing ones, so records of older and newer
schedulers can be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from scheduler.model.lending_state import BatchForecast, DecayedMean, LendingState
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
from scheduler.model.stage_balance import BatchTimes, NodeCounts, SplitAdvice, StageBalance

Record = TypeVar("Record")
_Readers = Mapping[str, Callable[[Any], Any]]


def encode(record: Node | Gang | RunPolicy | LendingState | StageBalance | AllocationEvent) -> str:
    """One line of JSON."""
    content = asdict(record)
    for node in (content, content.get("node") or {}):
        node.pop("report", None)  # kept in memory only
    return json.dumps(content, separators=(",", ":"))


def encode_key(key: GangKey) -> str:
    """Encode a gang's key, with any characters."""
    return json.dumps(key)


def decode_key(text: bytes) -> GangKey:
    """Decode a key of `encode_key`."""
    run_id, gang_id = json.loads(text)
    return run_id, gang_id


def decode_gang(text: bytes) -> Gang:
    """Decode a gang of `encode`."""
    return _record(Gang, json.loads(text), {"node_ids": tuple})


def decode_node(text: bytes) -> Node:
    """Decode a node of `encode`."""
    return _node(json.loads(text))


def decode_run_policy(text: bytes) -> RunPolicy:
    """Decode a policy of `encode`."""
    return _record(RunPolicy, json.loads(text))


def decode_lending_state(text: bytes) -> LendingState:
    """Decode the measurements of `encode`."""
    readers: _Readers = {
        "dedicated": _reader(DecayedMean),
        "full": _reader(DecayedMean),
        "generation": _reader(DecayedMean),
        "share": _reader(DecayedMean),
        "forecast": _reader(BatchForecast),
    }
    return _record(LendingState, json.loads(text), readers)


def decode_stage_balance(text: bytes) -> StageBalance:
    """Decode the measurements of `encode`."""
    readers: _Readers = {
        "advice": SplitAdvice,
        "batches": lambda entries: tuple(
            _record(BatchTimes, entry, {"node_counts": _reader(NodeCounts)}) for entry in entries
        ),
        "node_counts": _reader(NodeCounts),
        "generation_points": _pairs,
        "training_points": _pairs,
    }
    return _record(StageBalance, json.loads(text), readers)


def decode_event(text: bytes) -> AllocationEvent:
    """Decode a event of `encode`."""
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


def _pairs(entries: list[list[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, entries))


def _reader(record: type[Record]) -> Callable[[dict[str, Any]], Record]:
    return lambda content: _record(record, content)


def _record(
    record: type[Record],
    content: dict[str, Any],
    readers: _Readers | None = None,
) -> Record:
    """Build a `record` from `content`; nested values go through their readers."""
    names = {entry.name for entry in fields(record)}  # type: ignore[arg-type] # all are dataclasses
    values = {name: value for name, value in content.items() if name in names}
    for name, read in (readers or {}).items():
        if values.get(name) is not None:
            values[name] = read(values[name])
    return record(**values)
