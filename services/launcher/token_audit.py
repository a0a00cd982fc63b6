"""Compares the agents' own log of received tokens with what the store holds.

The log is written by the agent runner outside the system: a line per chunk, before anything else
is done with it. A token that an agent has seen must be stored exactly once, as it was seen.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

__all__ = ["Audit", "Received", "audit", "read_token_log"]


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token: its id and the weights that sampled it."""

    token_id: int
    weight_version: int


Received = dict[tuple[str, str], dict[int, list[Token]]]
"""(rollout_id, turn_id) -> offset -> every token received there."""


@dataclass(slots=True)
class Audit:
    """What the comparison found."""

    num_received: int = 0
    """Tokens the agents have seen, at distinct offsets."""
    num_lost: int = 0
    """Seen, but not stored at that place as seen."""
    num_duplicated: int = 0
    """Seen twice at one offset, or stored after the end that the agent saw."""
    num_wrong_version: int = 0
    """Stored under another weight version than the agent was told."""


def read_token_log(path: Path) -> Received:
    """The agents' log; a torn last line of a killed runner was never acted upon."""
    received: Received = defaultdict(lambda: defaultdict(list))
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            chunk = json.loads(line)
        except json.JSONDecodeError:
            continue
        turn = received[chunk["rollout_id"], chunk["turn_id"]]
        versions = [v for _, num, v, _ in chunk["spans"] for _ in range(num)]
        for i, (token_id, version) in enumerate(zip(chunk["token_ids"], versions, strict=True)):
            turn[chunk["offset"] + i].append(Token(token_id, version))
    return received


def audit(received: Received, stored: Iterable[trajectory_pb2.Trajectory]) -> Audit:
    """Hold every received token against the stored ones."""
    result = Audit()
    turns = {(t.rollout_id, turn.turn_id): turn for t in stored for turn in t.turns}
    for name, tokens in received.items():
        _compare(result, tokens, turns.get(name))
    return result


def _compare(
    result: Audit, received: dict[int, list[Token]], turn: trajectory_pb2.Turn | None
) -> None:
    kept = _sampled(turn) if turn is not None else []
    result.num_received += len(received)
    for offset, seen in received.items():
        result.num_duplicated += len(seen) - 1
        if offset >= len(kept) or kept[offset].token_id != seen[0].token_id:
            result.num_lost += 1
        elif kept[offset].weight_version != seen[0].weight_version:
            result.num_wrong_version += 1
    if turn is not None and turn.finish_reason and received:
        # The turn was closed: whatever lies behind the agent's last token was stored twice.
        result.num_duplicated += max(0, len(kept) - max(received) - 1)


def _sampled(turn: trajectory_pb2.Turn) -> list[Token]:
    return [
        Token(token_id, span.weight_version)
        for span in turn.tokens.spans
        if span.origin == tokens_pb2.ORIGIN_POLICY
        for token_id in turn.tokens.token_ids[span.start : span.start + span.num_tokens]
    ]
