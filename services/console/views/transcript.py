"""One rollout: its turns with the parts of their text, its group, and where weights changed."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from seamflow.common.v1 import tokens_pb2
from seamflow.enum_names import enum_name
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.console.sources.run_store import RunStore
from services.console.text import Part, TokenText, parts_of
from services.console.views.rows import rollout_row

_MAX_TURN_TOKENS = 65_536
"""Tokens of a turn that are looked at for parts."""
_SHOWN_TOKENS = 1500
"""Tokens of a part whose text is sent at once."""
_SHOWN_CHARACTERS = 20_000
_READ_AT_ONCE = 8

Values = dict[str, Any]


async def transcript(store: RunStore, rollout_id: str) -> Values:
    """Everything but single tokens."""
    (trajectory, task), found = await asyncio.gather(
        store.headers(rollout_id),
        store.found(pb.SearchRolloutsRequest(rollout_ids=[rollout_id])),
    )
    summary = next(iter(found.rollouts), trajectory_pb2.RolloutSummary(rollout_id=rollout_id))
    trained = (
        [each async for each in store.trained(summary.step, (rollout_id,))]
        if (summary.step)
        else []
    )
    row = rollout_row(summary, trained[0] if trained else None)
    members, turns = await asyncio.gather(
        _members(store, trajectory.group_id), _turns(store, trajectory)
    )
    calls = [p for turn in turns for p in turn["parts"] if p["kind"] == "tool_call"]
    return {
        "row": {**row, "tool_calls": len(calls)},
        "task": task[:_SHOWN_CHARACTERS] or trajectory.group_id,
        "labels": dict(trajectory.labels),
        "rewards": [
            {"name": each.name, "value": each.value, "turn_id": each.turn_id or None}
            for each in trajectory.rewards.rewards
        ],
        "policy_failure": trajectory.rewards.policy_failure or None,
        "failure": _failure(trajectory),
        "untrained_turns": list(trajectory.untrained_turn_ids),
        "group": {"id": trajectory.group_id, "members": members},
        "turns": turns,
        "events": [event for turn in trajectory.turns for event in _events(turn)],
        "traceparent": trajectory.traceparent or None,
    }


def _failure(trajectory: trajectory_pb2.Trajectory) -> Values | None:
    if not trajectory.HasField("failure"):
        return None
    name = enum_name(tokens_pb2.FailureClass, trajectory.failure.failure_class).lower()
    return {"class": name, "message": trajectory.failure.message}


async def _members(store: RunStore, group_id: str) -> list[Values]:
    if not group_id:
        return []
    found = await store.found(pb.SearchRolloutsRequest(group_id=group_id, page_size=1000))
    rows = sorted((rollout_row(each) for each in found.rollouts), key=lambda r: r["rollout_id"])
    kept = ("rollout_id", "reward", "state", "tokens", "failure", "finish")
    return [{name: row[name] for name in kept} for row in rows]


async def _turns(store: RunStore, trajectory: trajectory_pb2.Trajectory) -> list[Values]:
    reading = asyncio.Semaphore(_READ_AT_ONCE)

    async def read(turn: trajectory_pb2.Turn) -> Values:
        async with reading:
            window = await store.window(
                trajectory.rollout_id, turn.turn_id, turn.prefix_length, _MAX_TURN_TOKENS
            )
        return _turn(turn, window, store.text)

    return list(await asyncio.gather(*(read(turn) for turn in trajectory.turns)))


def _turn(turn: trajectory_pb2.Turn, window: pb.ReadTokensResponse, text: TokenText) -> Values:
    packed = window.tokens.token_ids
    ids = struct.unpack(f"<{len(packed) // 4}i", packed)
    sampled = [
        span.origin == tokens_pb2.ORIGIN_POLICY
        for span in window.tokens.spans
        for _ in range(span.num_tokens)
    ]
    parts = parts_of(ids, sampled, text)
    drift = MessageToDict(turn.drift) if turn.HasField("drift") else None
    return {
        "turn_id": turn.turn_id,
        "parent": turn.parent_turn_id or None,
        "prefix_turn": turn.prefix_turn_id or None,
        "prefix_length": turn.prefix_length,
        "num_tokens": window.total,
        "num_policy": sum(sampled),
        "finish": enum_name(tokens_pb2.FinishReason, turn.finish_reason).lower()
        if turn.finish_reason
        else None,
        "sampling": MessageToDict(turn.sampling, preserving_proto_field_name=True),
        "seconds": None,
        "drift": drift,
        "cut": window.total - turn.prefix_length > len(ids),
        "parts": [_part(part, ids, turn.prefix_length, text) for part in parts],
    }


def _part(part: Part, ids: Sequence[int], offset: int, text: TokenText) -> Values:
    shown = ids[part.start : part.start + min(part.count, _SHOWN_TOKENS)]
    written = text.decode(shown)
    more = part.count > len(shown) or len(written) > _SHOWN_CHARACTERS
    return {
        "role": part.role,
        "kind": part.kind,
        "text": written[:_SHOWN_CHARACTERS],
        "start": part.start + offset,
        "count": part.count,
        **({"more": True} if more else {}),
    }


def _events(turn: trajectory_pb2.Turn) -> Iterator[Values]:
    """Where sampling went on with other weights, or on another server."""
    before: tokens_pb2.Span | None = None
    for span in turn.tokens.spans:
        if span.origin != tokens_pb2.ORIGIN_POLICY:
            continue
        if before is not None:
            where = {"turn_id": turn.turn_id, "position": turn.prefix_length + span.start}
            if span.weight_version != before.weight_version:
                versions = {"from": before.weight_version, "to": span.weight_version}
                yield {**where, "kind": "version", **versions}
            if span.server_id != before.server_id:
                yield {**where, "kind": "server", "from": before.server_id, "to": span.server_id}
            elif span.weight_version == before.weight_version:
                yield {**where, "kind": "resumed", "from": None, "to": span.server_id}
        before = span
