"""How rollouts, turns and tokens are written in Redis: see `keys.py` and `append.lua`."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from services.chassis.redis_scripts import RUN_ID
from trajectory_manager.records import FailureClass, Outcome, Purpose, Reward, Rollout, RolloutState
from trajectory_manager.token_records import (
    BYTES_PER_TOKEN,
    Append,
    Finish,
    Opening,
    Origin,
    Span,
    Tokens,
    Turn,
    TurnRecord,
    VersionSource,
    merged,
)

_COUNTER_BITS = 32
_OPENING_FIELDS = tuple(field.name for field in fields(Opening))
_KIND = struct.Struct("<H")


def append_args(append: Append) -> list[Any]:
    """ARGV of append.lua."""
    tokens, finish = append.tokens, append.finish
    args: list[Any] = [
        append.rollout_id,
        RUN_ID,
        append.turn_id,
        append.epoch >> _COUNTER_BITS,
        append.epoch & (1 << _COUNTER_BITS) - 1,
        "" if append.offset is None else append.offset,
        tokens.ids,
        tokens.logprobs,
        "" if finish is None else finish_text(finish),
    ]
    for span in tokens.spans:
        args.append(span.num_tokens)
        args.append(_kind(span.origin, span.weight_version, span.version_source, span.server_id))
    return args


def record_args(rollout: Rollout, turns: Sequence[TurnRecord]) -> list[Any]:
    """ARGV of record.lua after the rollout's name."""
    kinds: dict[str, int] = {}
    of_turns: list[Any] = []
    for record in turns:
        segments = list(_segments(record.tokens, kinds))
        text = opening_text(record.turn.opening)
        of_turns += [record.turn.turn_id, text, _live(record), len(segments), *segments]
    args = [
        identity(rollout),
        rollout.traceparent,
        int(rollout.state),
        outcome_text(rollout.outcome),
    ]
    return [*args, _digest([*args, *of_turns]), json.dumps(list(kinds)), *of_turns]


def _digest(parts: Sequence[Any]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        whole.update(b"%d:" % len(data))
        whole.update(data)
    return whole.hexdigest()


def _segments(tokens: Tokens, kinds: dict[str, int]) -> Iterator[bytes]:
    start = 0
    for span in tokens.spans:
        kind = _kind(span.origin, span.weight_version, span.version_source, span.server_id)
        index = kinds.setdefault(kind, len(kinds))
        stop = start + span.num_tokens * BYTES_PER_TOKEN
        yield _KIND.pack(index) + tokens.ids[start:stop] + tokens.logprobs[start:stop]
        start = stop


def _live(record: TurnRecord) -> str:
    turn = record.turn
    finish = Finish(reason=turn.finish_reason, answer_key=turn.answer_key)
    return f"{record.tokens.num_tokens} 0 0 - {finish_text(finish)}"


def finish_text(finish: Finish) -> str:
    """The end of a turn."""
    drift = f" {finish.drift}" if finish.drift else ""
    return f"{finish.reason} {finish.answer_key}{drift}"


@lru_cache(maxsize=4096)
def _kind(origin: Origin, version: int, source: VersionSource, server_id: str) -> str:
    return f"{int(origin)} {version} {int(source)} {server_id}"


@lru_cache(maxsize=4096)
def _kind_span(text: bytes) -> Span:
    """The span of one token of this kind."""
    origin, weight_version, source, server_id = text.decode().split(" ")
    return Span(
        num_tokens=1,
        origin=Origin(int(origin)),
        weight_version=int(weight_version),
        version_source=VersionSource(int(source)),
        server_id=server_id,
    )


def opening_text(opening: Opening) -> str:
    """An opening as JSON."""
    return json.dumps({name: getattr(opening, name) for name in _OPENING_FIELDS})


def turn(opening: bytes, live: bytes) -> Turn:
    """A turn from its opening and its live state."""
    fields = json.loads(opening)
    if "message_keys" in fields:  # release 0.1 kept those of the whole prompt
        fields["new_message_keys"] = fields.pop("message_keys")[fields["num_matched_messages"] :]
    fields["new_message_keys"] = tuple(fields["new_message_keys"])
    _, incarnation, counter, _, *ended = live.decode().split(" ", 6)
    reason, answer_key, drift = (*ended, "", "", "")[:3]
    return Turn(
        opening=Opening(**fields),
        epoch=int(incarnation) << _COUNTER_BITS | int(counter),
        finish_reason=int(reason or 0),
        answer_key=answer_key,
        drift=drift,
    )


def turn_records(reply: Sequence[Any], *, spans_only: bool = False) -> list[TurnRecord]:
    """The turns in a reply of read.lua."""
    if reply[0] is None:
        return []
    kinds = [_kind_span(kind) for kind in reply[1]]
    tokens = _spans_of if spans_only else _tokens_of
    return [
        TurnRecord(turn=turn(opening, live), tokens=tokens(segments, kinds))
        for _, opening, live, *segments in reply[2]
    ]


def trajectory(
    run_id: str, rollout_id: str, reply: Sequence[Any], spans_only: bool
) -> tuple[Rollout, list[TurnRecord]] | None:
    """A rollout and its turns in a reply of read.lua."""
    if reply[0] is None:
        return None
    return rollout(run_id, rollout_id, reply[0]), turn_records(reply, spans_only=spans_only)


def _tokens_of(segments: Sequence[bytes], kinds: Sequence[Span]) -> Tokens:
    ids, logprobs, spans = [], [], []
    for segment in segments:
        middle = (len(segment) - _KIND.size) // 2 + _KIND.size
        ids.append(segment[_KIND.size : middle])
        logprobs.append(segment[middle:])
        num_tokens = (middle - _KIND.size) // BYTES_PER_TOKEN
        spans.append((kinds[_KIND.unpack_from(segment)[0]], num_tokens))
    return Tokens(ids=b"".join(ids), logprobs=b"".join(logprobs), spans=merged(spans))


def _spans_of(segments: Sequence[bytes], kinds: Sequence[Span]) -> Tokens:
    pairs = (segment.split(b" ") for segment in segments)
    return Tokens(spans=merged([(kinds[int(kind)], int(length)) for kind, length in pairs]))


def identity(rollout: Rollout) -> str:
    """What of a rollout never changes."""
    return json.dumps([int(rollout.purpose), rollout.group_id, rollout.pinned_weight_version])


def rollout(run_id: str, rollout_id: str, pairs: Sequence[bytes]) -> Rollout:
    """A rollout from the fields and values of its header."""
    header = dict(zip(pairs[::2], pairs[1::2], strict=True))
    purpose, group_id, pinned = json.loads(header[b"identity"])
    return Rollout(
        run_id=run_id,
        rollout_id=rollout_id,
        purpose=Purpose(purpose),
        group_id=group_id,
        credential_digest=header[b"credential"].decode(),
        pinned_weight_version=pinned,
        traceparent=header[b"traceparent"].decode(),
        state=RolloutState(int(header[b"state"])),
        outcome=_outcome(header.get(b"outcome")),
        create_time=float(header[b"created"]),
        finish_time=float(header.get(b"finished", 0)),
    )


def outcome_text(outcome: Outcome) -> str:
    """An outcome as JSON."""
    return json.dumps(asdict(outcome))


def _outcome(text: bytes | None) -> Outcome:
    if text is None:
        return Outcome()
    fields = json.loads(text)
    return Outcome(
        rewards=tuple(Reward(**reward) for reward in fields["rewards"]),
        failure_class=FailureClass(fields["failure_class"]),
        failure_message=fields["failure_message"],
    )
