"""What became of turns whose server was killed, from the agents' log and from the store."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from tests.lib.sglang.strikes import Strike

ENDED = (tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH)


def was_moved(trajectory: trajectory_pb2.Trajectory) -> int:
    """Turns that two servers sampled."""
    return sum(
        len({span.server_id for span in turn.tokens.spans if span.server_id}) > 1
        for turn in trajectory.turns
    )


def turns_before(token_log: Path, log_size: int) -> set[tuple[str, str]]:
    """Turns of which agents had received tokens when their log had `log_size` bytes."""
    lines = token_log.read_bytes()[:log_size].splitlines()
    return {(line["rollout_id"], line["turn_id"]) for line in map(json.loads, lines)}


def unfinished(
    turns: set[tuple[str, str]], stored: Iterable[trajectory_pb2.Trajectory]
) -> set[tuple[str, str]]:
    """Those that did not end by a stop token or at their limit."""
    ended = {
        (trajectory.rollout_id, turn.turn_id)
        for trajectory in stored
        for turn in trajectory.turns
        if turn.finish_reason in ENDED
    }
    return turns - ended


def stale_chunks(token_log: Path, strike: Strike) -> list[str]:
    """What a restarted engine sampled under weights older than those published before its end."""
    lines = token_log.read_bytes()[strike.log_back :].splitlines()
    return [
        f"{strike.node}: {version} instead of {strike.newest_version}"
        for line in map(json.loads, lines)
        for _, _, version, server in line["spans"]
        if server == strike.node and version < strike.newest_version
    ]
