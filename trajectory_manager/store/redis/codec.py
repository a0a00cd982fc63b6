"""The encoding of rollouts, turns and tokens in Redis: see `keys.py` and `append_tokens.lua`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from seamflow.common.v1.tokens_pb2 import RoutedExperts as RoutedExpertsMessage
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from trajectory_manager.model.records import (
    Labels,
    Outcome,
    Purpose,
    Rollout,
    RolloutState,
)
from trajectory_manager.model.tokens import (
    BYTES_PER_TOKEN,
    Origin,
    RolloutFinish,
    RoutedExperts,
    Span,
    Tokens,
    Turn,
    VersionSource,
)
from trajectory_manager.store.redis import record_json

_COUNTER_BITS = 32
_COUNTERS = (1 << _COUNTER_BITS) - 1
TURN, TURN_STATE = b"turn:", b"state:"
HEADER_FIELDS = (
    "identity",
    "credential",
    "traceparent",
    "required_version",
    "state",
    "outcome",
    "created",
    "finished",
    "labels",
)
"""Fields of a header that `rollout` decodes."""


def append_args(append: pb.TokenAppend) -> tuple[Any, ...]:
    """ARGV of one append of append_tokens.lua."""
    tokens, epoch = append.tokens, append.epoch
    spans = [
        f"{s.num_tokens}:{_kind(s.origin, s.weight_version, s.version_source, s.server_id)}"
        for s in tokens.spans
    ]
    return (
        append.rollout_id,
        append.turn_id,
        epoch >> _COUNTER_BITS,
        epoch & _COUNTERS,
        append.offset,
        tokens.token_ids + tokens.logprobs,
        _end_of(append) if append.finish_reason else "",
        ",".join(spans),
        *(_routed_args(append.routed_experts) if append.HasField("routed_experts") else ("", "")),
    )


def _end_of(append: pb.TokenAppend) -> str:
    drift = append.drift
    facts = (drift.position, drift.recorded_text, drift.retokenized_text)
    shown = json.dumps(facts) if append.HasField("drift") else ""
    return end_text(append.finish_reason, append.message_key, shown)


def _routed_args(routed: RoutedExpertsMessage) -> tuple[Any, Any]:
    sizes = f"{routed.num_tokens} {routed.num_layers} {routed.num_chosen} "
    return routed.start, sizes.encode() + routed.experts


def with_routed(turns: Sequence[Turn], stored: Mapping[bytes, bytes]) -> list[Turn]:
    """The same turns with the routed experts of their rollout."""
    found: dict[str, list[RoutedExperts]] = {}
    for field, value in stored.items():
        start, _, turn_id = field.partition(b" ")
        tokens, layers, chosen, experts = value.split(b" ", 3)
        sizes = int(start), int(tokens), int(layers), int(chosen)
        routed = RoutedExperts(*sizes, experts)
        found.setdefault(turn_id.decode(), []).append(routed)
    return [replace(turn, routed=tuple(sorted(found.get(turn.turn_id, ())))) for turn in turns]


def finish_args(finish: RolloutFinish) -> tuple[Any, ...]:
    """ARGV of one rollout of finish_rollout.lua."""
    return (
        finish.rollout_id,
        int(finish.credential_digest is not None),
        finish.credential_digest or "",
        int(finish.outcome.state),
        outcome_text(finish.outcome),
        _NEVER_STARTED,
    )


def record_args(rollout: Rollout, turns: Sequence[Turn]) -> tuple[Any, ...]:
    """ARGV of one rollout of record_rollout.lua."""
    of_turns: list[Any] = []
    for number, turn in enumerate(turns, 1):
        begin = f"{number} {turn.prompt_digest} {begin_text(turn)}"
        of_turns += [turn.turn_id, begin, _live(turn), turn.tokens.ids + turn.tokens.logprobs]
    args = (
        identity(rollout),
        rollout.traceparent,
        int(rollout.state),
        outcome_text(rollout.outcome),
    )
    digest = _digest([*args, *of_turns])
    return (rollout.rollout_id, *args, digest, len(turns), *of_turns)


def _digest(parts: Sequence[Any]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        whole.update(b"%d:" % len(data))
        whole.update(data)
    return whole.hexdigest()


def _live(turn: Turn) -> str:
    changes, start = list[str](), 0
    for span in turn.tokens.spans:
        changes.append(f"{start}:{_kind(*span[1:])}")
        start += span.num_tokens
    end = end_text(turn.finish_reason, turn.answer_key)
    return f"{start} 0 0 - {','.join(changes) or '-'} {end}"


def end_text(reason: int, answer_key: str, drift: str = "") -> str:
    return f"{reason} {answer_key} {drift}" if drift else f"{reason} {answer_key}"


@lru_cache(maxsize=4096)
def _kind(origin: int, version: int, source: int, server_id: str) -> str:
    return f"{int(origin)}:{version}:{int(source)}:{server_id}"


@lru_cache(maxsize=4096)
def _kind_span(text: str) -> Span:
    """The span of one token of this kind."""
    origin, weight_version, source, server_id = text.split(":", 3)
    return Span(
        num_tokens=1,
        origin=Origin(int(origin)),
        weight_version=int(weight_version),
        version_source=VersionSource(int(source)),
        server_id=server_id,
    )


_NOT_OF_BEGIN = (
    *("turn_id", "prompt_digest", "epoch", "finish_reason", "answer_key", "drift", "tokens"),
    "routed",
)


def begin_text(turn: Turn) -> str:
    """The start of a turn as JSON, without turn_id and prompt_digest."""
    return record_json.encode(turn, without=_NOT_OF_BEGIN)


def turn(turn_id: str, stored: bytes, live: bytes) -> Turn:
    """A turn from its record and its state, with its spans and without ids and log-probs."""
    _, digest, begin = stored.decode().split(" ", 2)
    num_tokens, incarnation, counter, _, spans, *ended = live.decode().split(" ", 7)
    reason, answer_key, drift = (*ended, "", "", "")[:3]
    begun = record_json.decode(Turn, begin, turn_id=turn_id, prompt_digest=digest)
    return replace(
        begun,
        epoch=int(incarnation) << _COUNTER_BITS | int(counter),
        finish_reason=int(reason or 0),
        answer_key=answer_key,
        drift=drift,
        tokens=Tokens(spans=_spans(int(num_tokens), spans)),
    )


def _spans(num_tokens: int, text: str) -> tuple[Span, ...]:
    if text == "-":
        return ()
    changes = [change.split(":", 1) for change in text.split(",")]
    starts = [int(start) for start, _ in changes]
    return tuple(
        _kind_span(kind)._replace(num_tokens=stop - start)
        for (_, kind), start, stop in zip(changes, starts, (*starts[1:], num_tokens), strict=True)
    )


def turns(header: Mapping[bytes, bytes]) -> list[Turn]:
    """The turns of a whole header in the order they began."""
    numbered = [
        (int(stored.partition(b" ")[0]), field[len(TURN) :], stored)
        for field, stored in header.items()
        if field.startswith(TURN)
    ]
    return [
        turn(turn_id.decode(), stored, header[TURN_STATE + turn_id])
        for _, turn_id, stored in sorted(numbered)
    ]


def with_chunks(turn: Turn, chunks: Sequence[bytes]) -> Turn:
    """The same turn with its ids and log-probs.

    Chunks are read after the state: tokens appended in between are left out.
    """
    num_bytes = BYTES_PER_TOKEN * turn.length
    halves = [len(chunk) // 2 for chunk in chunks]
    ids = b"".join([chunk[:half] for chunk, half in zip(chunks, halves, strict=True)])
    logprobs = b"".join([chunk[half:] for chunk, half in zip(chunks, halves, strict=True)])
    return replace(turn, tokens=Tokens(ids[:num_bytes], logprobs[:num_bytes], turn.tokens.spans))


def identity(rollout: Rollout) -> str:
    """The fields of a rollout that never change, as JSON."""
    return json.dumps([int(rollout.purpose), rollout.group_id, rollout.pinned_weight_version])


def rollout(run_id: str, rollout_id: str, header: Mapping[bytes, bytes]) -> Rollout:
    purpose, group_id, pinned = json.loads(header[b"identity"])[:3]
    return Rollout(
        run_id=run_id,
        rollout_id=rollout_id,
        purpose=Purpose(purpose),
        group_id=group_id,
        credential_digest=header[b"credential"].decode(),
        pinned_weight_version=pinned,
        required_weight_version=int(header.get(b"required_version", 0)),
        traceparent=header[b"traceparent"].decode(),
        state=RolloutState(int(header[b"state"])),
        outcome=record_json.decode(Outcome, header.get(b"outcome", b"{}")),
        create_time=float(header[b"created"]),
        finish_time=float(header.get(b"finished", 0)),
        labels=tuple(map(tuple, json.loads(header.get(b"labels") or b"[]"))),
    )


_NEVER_STARTED = identity(Rollout(run_id="", rollout_id="", purpose=Purpose.TRAIN))


def outcome_text(outcome: Outcome) -> str:
    return record_json.encode(outcome)


def labels_text(labels: Labels) -> str:
    """Labels as JSON; empty without any."""
    return json.dumps(labels) if labels else ""
