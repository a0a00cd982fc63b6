"""TokenStore on Redis: every step is one Lua script on the keys of one rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.chassis.errors import ServiceError
from services.chassis.redis_scripts import RUN_ID, Scripts
from trajectory_manager import keys, redis_forms
from trajectory_manager.records import Outcome, Purpose, Rollout
from trajectory_manager.refusals import accepted, refusal, refused
from trajectory_manager.token_records import (
    Append,
    Appended,
    Opening,
    Tokens,
    Turn,
    TurnRecord,
)

_OLD_SCHEMA = "OLD_SCHEMA"


class RedisTokenStore:
    """Implements `TokenStore`."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def create_rollout(self, rollout: Rollout, *, leased: bool) -> None:
        """See `TokenStore`."""
        await self._call(
            "create_rollout",
            rollout.run_id,
            rollout.rollout_id,
            int(leased),
            redis_forms.identity(rollout),
            rollout.credential_digest,
            rollout.traceparent,
        )

    async def open_turn(
        self, run_id: str, rollout_id: str, credential_digest: str, opening: Opening
    ) -> Turn:
        """See `TokenStore`."""
        stored, live = await self._call(
            "open_turn",
            run_id,
            rollout_id,
            RUN_ID,
            credential_digest,
            opening.turn_id,
            opening.attempt_id,
            redis_forms.opening_text(opening),
            opening.prompt_digest,
        )
        return redis_forms.turn(stored, live)

    async def append(self, appends: Sequence[Append]) -> list[Appended | ServiceError]:
        """See `TokenStore`."""
        replies = await self._scripts.call_many(
            "append",
            [
                (keys.rollout_keys(a.run_id, a.rollout_id), redis_forms.append_args(a))
                for a in appends
            ],
        )
        return [
            Appended(num_tokens=reply[1], num_new=reply[2])
            if not isinstance(reply, ServiceError) and reply[0] == b"ok"
            else await self._not_appended(append, reply)
            for append, reply in zip(appends, replies, strict=True)
        ]

    async def _not_appended(self, append: Append, reply: Any) -> Appended | ServiceError:
        if isinstance(reply, ServiceError):
            return reply
        if reply[1] == _OLD_SCHEMA.encode():
            await self._migrate(append.run_id, append.rollout_id)
            return (await self.append([append]))[0]
        return refused(reply)

    async def close(
        self, run_id: str, rollout_id: str, credential_digest: str | None, outcome: Outcome
    ) -> tuple[Rollout, list[TurnRecord]]:
        """See `TokenStore`."""
        never_started = Rollout(run_id=run_id, rollout_id=rollout_id, purpose=Purpose.TRAIN)
        reply = await self._call(
            "close_rollout",
            run_id,
            rollout_id,
            int(credential_digest is not None),
            credential_digest or "",
            int(outcome.state),
            redis_forms.outcome_text(outcome),
            redis_forms.identity(never_started),
        )
        turns = redis_forms.turn_records(reply)
        return redis_forms.rollout(run_id, rollout_id, reply[0]), turns

    async def rollout(self, run_id: str, rollout_id: str) -> Rollout | None:
        """See `TokenStore`."""
        (pairs, *_) = await self._call("read", run_id, rollout_id, "header")
        return redis_forms.rollout(run_id, rollout_id, pairs) if pairs else None

    async def turns(self, run_id: str, rollout_id: str) -> list[Turn]:
        """See `TokenStore`."""
        reply = await self._call("read", run_id, rollout_id, "turns")
        return [record.turn for record in redis_forms.turn_records(reply)]

    async def newest(self, run_id: str, rollout_id: str) -> TurnRecord | None:
        """See `TokenStore`."""
        reply = await self._call("read", run_id, rollout_id, "newest")
        found = redis_forms.turn_records(reply)
        filled = await self._filled(run_id, {rollout_id: found})
        return next(iter(filled[rollout_id]), None)

    async def tokens(self, run_id: str, rollout_id: str, turn_ids: Sequence[str]) -> list[Tokens]:
        """See `TokenStore`."""
        if not turn_ids:
            return []
        reply = await self._call("read", run_id, rollout_id, "turns", *turn_ids)
        if reply[0] is None:
            raise refusal("UNKNOWN_ROLLOUT", rollout_id)
        filled = await self._filled(run_id, {rollout_id: redis_forms.turn_records(reply)})
        return [record.tokens for record in filled[rollout_id]]

    async def read(
        self, run_id: str, rollout_ids: Sequence[str], *, spans_only: bool = False
    ) -> list[tuple[Rollout, list[TurnRecord]] | None]:
        """See `TokenStore`."""
        calls = [(keys.rollout_keys(run_id, name), (name, "turns")) for name in rollout_ids]
        replies = await self._scripts.call_many("read", calls)
        rollouts, turns = {}, {}
        for name, reply in zip(rollout_ids, replies, strict=True):
            facts = await self._fresh(reply, run_id, name, "read", "turns")
            turns[name] = redis_forms.turn_records(facts)
            if facts[0] is not None:
                rollouts[name] = redis_forms.rollout(run_id, name, facts[0])
        if not spans_only:
            turns = await self._filled(run_id, turns)
        return [(rollouts[name], turns[name]) if name in rollouts else None for name in rollout_ids]

    async def _filled(
        self, run_id: str, turns: Mapping[str, Sequence[TurnRecord]]
    ) -> dict[str, list[TurnRecord]]:
        """The same turns by rollout, with ids and log-probs."""
        names = [
            keys.rollout_keys(run_id, name)[-1] + record.turn.turn_id
            for name, records in turns.items()
            for record in records
        ]
        segments = iter(await self._scripts.lists(names))
        return {
            name: [redis_forms.with_segments(record, next(segments)) for record in records]
            for name, records in turns.items()
        }

    async def record(self, rollout: Rollout, turns: Sequence[TurnRecord]) -> bool:
        """See `TokenStore`."""
        args = redis_forms.record_args(rollout, turns)
        (new,) = await self._call("record", rollout.run_id, rollout.rollout_id, *args)
        return bool(new)

    async def _call(self, script: str, run_id: str, rollout_id: str, *args: Any) -> list[Any]:
        reply = await self._scripts.call(
            script, keys=keys.rollout_keys(run_id, rollout_id), args=(rollout_id, *args)
        )
        return await self._fresh(reply, run_id, rollout_id, script, *args)

    async def _fresh(
        self, reply: Any, run_id: str, rollout_id: str, script: str, *args: Any
    ) -> list[Any]:
        """What the script answered, asked again once a record of an older schema is migrated."""
        if isinstance(reply, ServiceError):
            raise reply
        if reply[0] == b"refused" and reply[1] == _OLD_SCHEMA.encode():
            await self._migrate(run_id, rollout_id)
            return await self._call(script, run_id, rollout_id, *args)
        return accepted(reply)

    async def _migrate(self, run_id: str, rollout_id: str) -> None:
        both = (*keys.rollout_keys(run_id, rollout_id), *keys.old_rollout_keys(run_id, rollout_id))
        accepted(await self._scripts.call("migrate", keys=both, args=(rollout_id,)))
