"""How rollouts, turns and tokens are written in Redis: see `keys.py` and `append.lua`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields, replace
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
)

_COUNTER_BITS = 32
_OPENING_FIELDS = tuple(field.name for field in fields(Opening))


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
        live = _live(record, kinds)
        segment = record.tokens.ids + record.tokens.logprobs
        of_turns += [record.turn.turn_id, opening_text(record.turn.opening), live, segment]
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


def _live(record: TurnRecord, kinds: dict[str, int]) -> str:
    turn, changes, start = record.turn, list[str](), 0
    for span in record.tokens.spans:
        kind = _kind(span.origin, span.weight_version, span.version_source, span.server_id)
        changes.append(f"{start}:{kinds.setdefault(kind, len(kinds))}")
        start += span.num_tokens
    finish = Finish(reason=turn.finish_reason, answer_key=turn.answer_key)
    return f"{start} 0 0 - {','.join(changes) or '-'} {finish_text(finish)}"


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
    _, incarnation, counter, _, _, *ended = live.decode().split(" ", 7)
    reason, answer_key, drift = (*ended, "", "", "")[:3]
    return Turn(
        opening=Opening(**fields),
        epoch=int(incarnation) << _COUNTER_BITS | int(counter),
        finish_reason=int(reason or 0),
        answer_key=answer_key,
        drift=drift,
    )


def _spans(live: bytes, kinds: Sequence[Span]) -> tuple[Span, ...]:
    num_tokens, _, _, _, text, *_ = live.decode().split(" ", 5)
    if text == "-":
        return ()
    changes = [change.split(":") for change in text.split(",")]
    stops = [*(int(start) for start, _ in changes[1:]), int(num_tokens)]
    return tuple(
        replace(kinds[int(kind)], num_tokens=stop - int(start))
        for (start, kind), stop in zip(changes, stops, strict=True)
    )


def turn_records(reply: Sequence[Any]) -> list[TurnRecord]:
    """The turns in a reply of read.lua, with spans and without ids and log-probs."""
    if reply[0] is None:
        return []
    kinds = [_kind_span(kind) for kind in reply[1]]
    return [
        TurnRecord(turn=turn(opening, live), tokens=Tokens(spans=_spans(live, kinds)))
        for _, opening, live in reply[2]
    ]


def with_segments(record: TurnRecord, segments: Sequence[bytes]) -> TurnRecord:
    """The same turn with its ids and log-probs.

    Segments are read after the live state: what was appended in between is left out.
    """
    num_bytes = BYTES_PER_TOKEN * sum(span.num_tokens for span in record.tokens.spans)
    halves = [len(segment) // 2 for segment in segments]
    ids = b"".join([segment[:half] for segment, half in zip(segments, halves, strict=True)])
    logprobs = b"".join([segment[half:] for segment, half in zip(segments, halves, strict=True)])
    tokens = Tokens(ids=ids[:num_bytes], logprobs=logprobs[:num_bytes], spans=record.tokens.spans)
    return TurnRecord(turn=record.turn, tokens=tokens)


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
    rewards = [
        {"name": reward.name, "value": reward.value, "turn_id": reward.turn_id}
        for reward in outcome.rewards
    ]
    return json.dumps(
        {
            "rewards": rewards,
            "failure_class": outcome.failure_class,
            "failure_message": outcome.failure_message,
        }
    )


def _outcome(text: bytes | None) -> Outcome:
    if text is None:
        return Outcome()
    fields = json.loads(text)
    return Outcome(
        rewards=tuple(Reward(**reward) for reward in fields["rewards"]),
        failure_class=FailureClass(fields["failure_class"]),
        failure_message=fields["failure_message"],
    )
