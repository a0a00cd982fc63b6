"""Audit: compares the agents' own log of received tokens with the stored ones.

The agent runner writes the log, a line per chunk, before it processes the chunk. A token that an
agent has received must be stored exactly once, unchanged.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token: its id and the weights that sampled it."""

    token_id: int
    weight_version: int


Received = dict[tuple[str, str], dict[int, list[Token]]]
"""(rollout_id, turn_id) -> offset -> every token received there."""


@dataclass(slots=True)
class Audit:
    """Result of an audit."""

    num_received: int = 0
    """Tokens the agents have received, at distinct offsets."""
    num_lost: int = 0
    """Received, but missing or different in the store."""
    num_duplicated: int = 0
    """Received twice at one offset, or stored beyond the last token that the agent received.

    The rest of a turn that an agent abandoned is neither: its rollout has failed.
    """
    num_wrong_version: int = 0
    """Stored with another weight version than received."""


def audit_figures(log: Path, stored: Iterable[trajectory_pb2.Trajectory]) -> dict[str, Any]:
    """The result for a summary; null where the agent kept no log, as only the runner does."""
    done = audit(read_token_log(log), stored) if log.exists() else None
    return {
        "token_audit": "done" if done else "not audited: the agent kept no log of its tokens",
        "tokens_received_by_agents": done and done.num_received,
        "tokens_lost": done and done.num_lost,
        "tokens_duplicated": done and done.num_duplicated,
        "tokens_with_wrong_version": done and done.num_wrong_version,
    }


def read_token_log(path: Path) -> Received:
    """Read the agents' log; the incomplete last line of a killed runner is skipped."""
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
    result = Audit()
    turns = {(t.rollout_id, turn.turn_id): (t, turn) for t in stored for turn in t.turns}
    for name, tokens in received.items():
        found = turns.get(name)
        _compare(result, tokens, found[1] if found else None)
        if found and found[0].state != trajectory_pb2.ROLLOUT_STATE_FAILED:
            result.num_duplicated += _num_beyond(tokens, found[1])
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


def _num_beyond(received: dict[int, list[Token]], turn: trajectory_pb2.Turn) -> int:
    """Tokens of a turn that has ended after the agent's last one: they were stored twice."""
    if not turn.finish_reason or not received:
        return 0
    return max(0, len(_sampled(turn)) - max(received) - 1)


def _sampled(turn: trajectory_pb2.Turn) -> list[Token]:
    return [
        Token(token_id, span.weight_version)
        for span in turn.tokens.spans
        if span.origin == tokens_pb2.ORIGIN_POLICY
        for token_id in turn.tokens.token_ids[span.start : span.start + span.num_tokens]
    ]
