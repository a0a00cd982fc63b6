"""`seamflow status` and `seamflow why-stuck`: a run on one screen, and what waits for what."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from seamflow.cli.parser import Verbs
from seamflow.errors import SeamflowError, UnavailableError
from seamflow.inspect.diagnosis import Finding
from seamflow.inspect.endpoints import Endpoints
from seamflow.inspect.run_folders import ended_status
from seamflow.inspect.snapshot import Snapshot, gather
from seamflow.inspect.status_screen import ago, status_screen
from seamflow.inspect.why_stuck import why_stuck

_UNAVAILABLE = 69  # sysexits.h


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


def register(verbs: Verbs) -> None:
    status = verbs.add("status", "The run on one screen.", _status)
    why = verbs.add("why-stuck", "What waits for what, since when, and the cure.", _why_stuck)
    for command in (status, why):
        command.add_argument("--json", action="store_true", help="write JSON, with every field")


async def _status(given: argparse.Namespace, endpoints: Endpoints) -> int:
    if endpoints.ended and endpoints.folder and not given.json:
        print(ended_status(endpoints.folder, endpoints.ended))
        return 0
    if endpoints.ended and not given.json:
        raise UnavailableError(endpoints.ended)
    snapshot = await gather(endpoints)
    print(json.dumps(plain(snapshot), indent=2) if given.json else status_screen(snapshot))
    return code_of(snapshot)


async def _why_stuck(given: argparse.Namespace, endpoints: Endpoints) -> int:
    if endpoints.ended and not given.json:
        print(endpoints.ended)
        return 0
    snapshot = await gather(endpoints, history=True)
    findings = why_stuck(snapshot)
    if given.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        print("\n".join(_render(finding, snapshot) for finding in findings))
    return code_of(snapshot)


def code_of(snapshot: Snapshot) -> int:
    """Exit code: 0 if every service and every rollout server answered."""
    is_whole = all(server.info is not None for server in snapshot.servers)
    return 0 if is_whole and not snapshot.problems else _UNAVAILABLE


def _render(finding: Finding, snapshot: Snapshot) -> str:
    mark = "·" if finding.normal else "!"
    since = "" if finding.since is None else f" (for {ago(snapshot.now - finding.since)})"
    return f"{mark} {finding.sentence}{since}\n    {finding.cure}"
