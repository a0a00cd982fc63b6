"""What was acknowledged, written down outside the system: a JSON line per event.

The writer of a log is never killed before its line is written (`os.write` on an O_APPEND file
reaches the kernel, which outlives the process), so a line is there if and only if the caller knew.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TurnName = tuple[str, str]
"""(rollout_id, turn_id)."""

_EXACT = 256


def logprob_of(token_id: int) -> float:
    """The log-prob that every writer stores with a token; exact in float32."""
    return -(token_id % _EXACT) / _EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """An append that the store acknowledged."""

    sent: float
    """Monotonic time at which the successful call was sent."""
    received: float
    """Monotonic time of its answer."""


@dataclass(slots=True)
class History:
    """Everything a log holds."""

    tokens: dict[TurnName, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """Turn -> offset -> id of each acknowledged token."""
    conflicting: int = 0
    """Offsets acknowledged twice with different ids."""
    finished: set[str] = field(default_factory=set)
    """Rollouts whose FinishRollout was acknowledged."""
    abandoned: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Error reason -> rollouts given up because of it."""


class Log:
    """Appends events to a file; several processes may share it."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; it is made if it is not there."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: str, **facts: Any) -> None:
        """Add one line: the event and its facts."""
        os.write(self._file, (json.dumps({"event": event, **facts}) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_history(*paths: Path) -> History:
    """The events of all logs together."""
    history = History()
    for path in paths:
        for event in _events(path.read_bytes()):
            _add(history, event)
    return history


def new_acks(path: Path, read: int) -> tuple[list[Ack], int]:
    """The appends acknowledged in a log from its byte `read` on, and where to read on."""
    if not path.exists():
        return [], read
    with path.open("rb") as file:
        file.seek(read)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    events = _events(whole)
    acks = [Ack(sent=e["sent"], received=e["received"]) for e in events if e.get("sent")]
    return acks, read + len(whole)


def _events(lines: bytes) -> Iterator[dict[str, Any]]:
    for line in lines.splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            # Torn: by the death of a control's writer, which then never acted on it, or because
            # reading began in the middle of a line that was being written.
            continue


def _add(history: History, event: dict[str, Any]) -> None:
    match event["event"]:
        case "tokens":
            _add_tokens(history, event)
        case "finished":
            history.finished.add(event["rollout_id"])
        case "abandoned":
            history.abandoned[event["reason"]] += 1


def _add_tokens(history: History, event: dict[str, Any]) -> None:
    tokens = history.tokens[event["rollout_id"], event["turn_id"]]
    for offset, token_id in enumerate(event["ids"], event["offset"]):
        history.conflicting += tokens.setdefault(offset, token_id) != token_id
