"""TokenStore on Redis: every change is one Lua script on the keys of one rollout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from redis.asyncio import Redis

from services.chassis.redis import Scripts, store_errors
from trajectory_manager import keys
from trajectory_manager.memory_tokens import GAP_MESSAGE
from trajectory_manager.records import (
    FailureClass,
    Outcome,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
)
from trajectory_manager.refusals import accepted
from trajectory_manager.token_records import Opening, Origin, Span, Tokens, Turn, VersionSource

_COUNTER_BITS = 32


class RedisTokenStore:
    """Implements `TokenStore`."""

    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        # redis-py's types cannot say that replies are bytes.
        self._redis: Any = redis
        self._scripts = scripts

    async def create_rollout(self, rollout: Rollout, *, leased: bool) -> None:
        """See `TokenStore`."""
        await self._call(
            "create_rollout",
            rollout.run_id,
            rollout.rollout_id,
            int(leased),
            _identity(rollout),
            rollout.credential_digest,
            rollout.traceparent,
        )

    async def open_turn(
        self, run_id: str, rollout_id: str, credential_digest: str, opening: Opening
    ) -> Turn:
        """See `TokenStore`."""
        reply = await self._call(
            "open_turn",
            run_id,
            rollout_id,
            credential_digest,
            opening.turn_id,
            opening.attempt_id,
            json.dumps(asdict(opening)),
            opening.prompt_digest,
        )
        stored, incarnation, counter, finish = reply
        return _turn(stored, int(incarnation), int(counter), finish)

    async def append(
        self, run_id: str, rollout_id: str, turn_id: str, epoch: int, offset: int, tokens: Tokens
    ) -> tuple[int, int]:
        """See `TokenStore`."""
        reply = await self._call(
            "append",
            run_id,
            rollout_id,
            turn_id,
            *_epoch_parts(epoch),
            offset,
            tokens.ids,
            tokens.logprobs,
            _GAP_OUTCOME,
            *(_span_text(span) for span in tokens.spans),
            more_keys=keys.turn_keys(run_id, rollout_id, turn_id),
        )
        return int(reply[0]), int(reply[1])

    async def end_turn(
        self,
        run_id: str,
        rollout_id: str,
        turn_id: str,
        epoch: int,
        finish_reason: int,
        answer_key: str,
    ) -> None:
        """See `TokenStore`."""
        finish = f"{finish_reason} {answer_key}"
        await self._call("end_turn", run_id, rollout_id, turn_id, *_epoch_parts(epoch), finish)

    async def close(
        self, run_id: str, rollout_id: str, credential_digest: str | None, outcome: Outcome
    ) -> Rollout:
        """See `TokenStore`."""
        never_started = Rollout(run_id=run_id, rollout_id=rollout_id, purpose=Purpose.TRAIN)
        (pairs,) = await self._call(
            "close_rollout",
            run_id,
            rollout_id,
            int(credential_digest is not None),
            credential_digest or "",
            int(outcome.state),
            json.dumps(asdict(outcome)),
            _identity(never_started),
        )
        header = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return _rollout(run_id, rollout_id, header)

    async def rollout(self, run_id: str, rollout_id: str) -> Rollout | None:
        """See `TokenStore`."""
        with store_errors("rollout"):
            header = await self._redis.hgetall(keys.rollout_keys(run_id, rollout_id)[0])
        return _rollout(run_id, rollout_id, header) if header else None

    async def turns(self, run_id: str, rollout_id: str) -> list[Turn]:
        """See `TokenStore`."""
        _, order, turns, writers, ends = keys.rollout_keys(run_id, rollout_id)
        with store_errors("turns"):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.lrange(order, 0, -1).hgetall(turns).hgetall(writers).hgetall(ends)
                names, openings, written, ended = await pipe.execute()
        listed = []
        for name in names:
            incarnation, counter, _ = written[name].split(b":", 2)
            finish = ended.get(name, b"")
            listed.append(_turn(openings[name], int(incarnation), int(counter), finish))
        return listed

    async def tokens(self, run_id: str, rollout_id: str, turn_ids: Sequence[str]) -> list[Tokens]:
        """See `TokenStore`."""
        if not turn_ids:
            return []
        with store_errors("tokens"):
            async with self._redis.pipeline(transaction=True) as pipe:
                for turn_id in turn_ids:
                    ids, logprobs, spans = keys.turn_keys(run_id, rollout_id, turn_id)
                    pipe.get(ids).get(logprobs).lrange(spans, 0, -1)
                replies = await pipe.execute()
        return [
            Tokens(ids=ids or b"", logprobs=logprobs or b"", spans=tuple(map(_span, spans)))
            for ids, logprobs, spans in zip(*[iter(replies)] * 3, strict=True)
        ]

    async def spans(
        self, run_id: str, rollout_id: str, turn_ids: Sequence[str]
    ) -> list[tuple[Span, ...]]:
        """See `TokenStore`."""
        if not turn_ids:
            return []
        with store_errors("spans"):
            async with self._redis.pipeline(transaction=True) as pipe:
                for turn_id in turn_ids:
                    pipe.lrange(keys.turn_keys(run_id, rollout_id, turn_id)[2], 0, -1)
                replies = await pipe.execute()
        return [tuple(map(_span, spans)) for spans in replies]

    async def _call(
        self, script: str, run_id: str, rollout_id: str, *args: Any, more_keys: Sequence[str] = ()
    ) -> list[Any]:
        reply = await self._scripts.call(
            script,
            keys=[*keys.rollout_keys(run_id, rollout_id), *more_keys],
            args=[rollout_id, *args],
        )
        return accepted(reply)


_GAP_OUTCOME = json.dumps(
    asdict(Outcome(failure_class=FailureClass.INFRASTRUCTURE, failure_message=GAP_MESSAGE))
)


def _epoch_parts(epoch: int) -> tuple[int, int]:
    return epoch >> _COUNTER_BITS, epoch & (1 << _COUNTER_BITS) - 1


def _turn(opening: bytes, incarnation: int, counter: int, finish: bytes) -> Turn:
    fields = json.loads(opening)
    fields["message_keys"] = tuple(fields["message_keys"])
    reason, _, answer_key = finish.decode().partition(" ")
    return Turn(
        opening=Opening(**fields),
        epoch=incarnation << _COUNTER_BITS | counter,
        finish_reason=int(reason or 0),
        answer_key=answer_key,
    )


def _span_text(span: Span) -> str:
    facts = (span.num_tokens, span.origin, span.weight_version, span.version_source)
    return f"{' '.join(str(int(fact)) for fact in facts)} {span.server_id}"


def _span(text: bytes) -> Span:
    num_tokens, origin, weight_version, source, server_id = text.decode().split(" ")
    return Span(
        num_tokens=int(num_tokens),
        origin=Origin(int(origin)),
        weight_version=int(weight_version),
        version_source=VersionSource(int(source)),
        server_id=server_id,
    )


def _identity(rollout: Rollout) -> str:
    return json.dumps([int(rollout.purpose), rollout.group_id, rollout.pinned_weight_version])


def _rollout(run_id: str, rollout_id: str, header: Mapping[bytes, bytes]) -> Rollout:
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


def _outcome(text: bytes | None) -> Outcome:
    if text is None:
        return Outcome()
    fields = json.loads(text)
    return Outcome(
        rewards=tuple(Reward(**reward) for reward in fields["rewards"]),
        failure_class=FailureClass(fields["failure_class"]),
        failure_message=fields["failure_message"],
    )
