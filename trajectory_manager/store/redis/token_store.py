"""Rollouts with their turns and tokens: every change is one Lua script on one rollout's keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import ServiceError
from services.chassis.redis.scripts import RUN_ID, Scripts
from trajectory_manager.model.records import Rollout
from trajectory_manager.model.tokens import (
    Appended,
    Cut,
    RolloutFinish,
    Tokens,
    Turn,
)
from trajectory_manager.store.errors import reply_error, store_error, unwrap
from trajectory_manager.store.redis import codec, keys

_Header = dict[bytes, bytes]

_ERROR = b"error"


class TokenStore:
    """The record of each rollout: header, turns, tokens. Each public method is one atomic step."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def start_rollout(self, rollout: Rollout, *, leased: bool) -> None:
        """Create the record. Idempotent; with a lease the credential may change before any turn.

        Raises:
            ServiceError: ALREADY_EXISTS with other content, ROLLOUT_FINISHED.
        """
        await self._call(
            "start_rollout",
            rollout.run_id,
            rollout.rollout_id,
            int(leased),
            codec.identity(rollout),
            rollout.credential_digest,
            rollout.traceparent,
            rollout.required_weight_version,
            codec.labels_text(rollout.labels),
        )

    async def begin_turn(
        self, run_id: str, rollout_id: str, credential_digest: str, turn: Turn
    ) -> tuple[Rollout, Turn]:
        """Create the turn or take it over; an ended turn is only returned, with its tokens.

        The same attempt keeps its epoch, another gets the next; a restart of the store fences all.

        Raises:
            ServiceError: NOT_FOUND, PERMISSION_DENIED, ROLLOUT_FINISHED, ALREADY_EXISTS (another
                prompt, sampling or template).
        """
        begun = await self._begin_turn(run_id, rollout_id, credential_digest, turn, 0)
        assert begun is not None
        return begun

    async def begin_first_turn(
        self, run_id: str, rollout_id: str, credential_digest: str, turn: Turn
    ) -> tuple[Rollout, Turn] | None:
        """As `begin_turn`, unless the rollout has turns and this is none of them: then None."""
        return await self._begin_turn(run_id, rollout_id, credential_digest, turn, 1)

    async def _begin_turn(
        self, run_id: str, rollout_id: str, credential_digest: str, turn: Turn, only_first: int
    ) -> tuple[Rollout, Turn] | None:
        reply = await self._call(
            "begin_turn",
            run_id,
            rollout_id,
            RUN_ID,
            credential_digest,
            turn.turn_id,
            turn.attempt_id,
            codec.begin_text(turn),
            turn.prompt_digest,
            only_first,
            *codec.HEADER_FIELDS,
        )
        if not reply:
            return None
        stored, live, chunks, values = reply
        header = _known(codec.HEADER_FIELDS, values)
        begun = codec.with_chunks(codec.turn(turn.turn_id, stored, live), chunks)
        return codec.rollout(run_id, rollout_id, header), begun

    async def append(self, appends: Sequence[pb.TokenAppend]) -> list[Appended | ServiceError]:
        """Execute `appends` independently, in order; a result is an error where one failed.

        Appends after a failed one of the same turn would leave a gap and get the same error.
        Idempotent. Errors: NOT_FOUND, STALE_EPOCH, ROLLOUT_FINISHED, TURN_FINISHED, ALREADY_EXISTS
        (the overlap or the end differs), OFFSET_GAP (which has failed the rollout as
        INFRASTRUCTURE), and those of an unavailable or full store.
        """
        parts = [
            (keys.rollout_keys(append.run_id, append.rollout_id), codec.append_args(append))
            for append in appends
        ]
        replies = await self._scripts.call_each("append_tokens", parts, (RUN_ID,))
        return [_appended(reply) for reply in replies]

    async def finish(
        self, run_id: str, finishes: Sequence[RolloutFinish]
    ) -> list[tuple[Rollout, list[Turn]] | ServiceError]:
        """Finish each rollout that runs; return each with the spans of its turns.

        Errors: NOT_FOUND, PERMISSION_DENIED, and those of an unavailable or full store.
        """
        parts = [
            (keys.rollout_keys(run_id, finish.rollout_id)[:1], codec.finish_args(finish))
            for finish in finishes
        ]
        replies = await self._scripts.call_each("finish_rollout", parts)
        return [
            _closed(run_id, finish.rollout_id, reply)
            for finish, reply in zip(finishes, replies, strict=True)
        ]

    async def rollout(self, run_id: str, rollout_id: str) -> Rollout | None:
        """The header, or None."""
        header = await self._fields(run_id, rollout_id, codec.HEADER_FIELDS)
        return codec.rollout(run_id, rollout_id, header) if header else None

    async def turns(self, run_id: str, rollout_id: str) -> list[Turn]:
        """All turns in the order they began, with their spans."""
        (header,) = await self._headers(run_id, [rollout_id])
        return codec.turns(header)

    async def newest_turn(self, run_id: str, rollout_id: str) -> Turn | None:
        """The turn that began last, with its tokens; None if there is none."""
        found = await self._call("read_newest_turn", run_id, rollout_id)
        if not found:
            return None
        turn_id, stored, live, chunks = found
        return codec.with_chunks(codec.turn(turn_id.decode(), stored, live), chunks)

    async def tokens(self, run_id: str, rollout_id: str, turn_ids: Sequence[str]) -> list[Tokens]:
        """The own tokens of each turn.

        Raises:
            ServiceError: NOT_FOUND, of the rollout or of a turn.
        """
        if not turn_ids:
            return []
        return [turn.tokens for turn in await self._turns(run_id, rollout_id, turn_ids)]

    async def windows(self, run_id: str, rollout_id: str, cuts: Sequence[Cut]) -> list[Tokens]:
        """Of each cut the stored tokens, without spans.

        Raises:
            ServiceError: NOT_FOUND (rollout).
        """
        flat = [part for cut in cuts for part in cut]
        (found,) = await self._call("read_tokens", run_id, rollout_id, *flat)
        return [Tokens(ids=ids, logprobs=logprobs) for ids, logprobs in found]

    async def _turns(self, run_id: str, rollout_id: str, turn_ids: Sequence[str]) -> list[Turn]:
        names = [name.encode() for name in turn_ids]
        fields = [part + name for name in names for part in (codec.TURN, codec.TURN_STATE)]
        header = await self._fields(run_id, rollout_id, fields)
        if not header:
            raise store_error("UNKNOWN_ROLLOUT", rollout_id)
        for name in names:
            if codec.TURN + name not in header:
                raise store_error("UNKNOWN_TURN", name.decode())
        found = [
            codec.turn(name.decode(), header[codec.TURN + name], header[codec.TURN_STATE + name])
            for name in names
        ]
        return (await self._filled(run_id, {rollout_id: found}))[rollout_id]

    async def read(
        self, run_id: str, rollout_ids: Sequence[str], *, spans_only: bool = False
    ) -> list[tuple[Rollout, list[Turn]] | None]:
        """Each rollout with its turns in the order they began, as one snapshot; None: unknown."""
        found = await self._headers(run_id, rollout_ids)
        headers = {name: header for name, header in zip(rollout_ids, found, strict=True) if header}
        turns = {name: codec.turns(header) for name, header in headers.items()}
        if not spans_only:
            turns = await self._with_routed(run_id, await self._filled(run_id, turns))
        return [
            (codec.rollout(run_id, name, headers[name]), turns[name]) if name in headers else None
            for name in rollout_ids
        ]

    async def _filled(
        self, run_id: str, turns: Mapping[str, Sequence[Turn]]
    ) -> dict[str, list[Turn]]:
        """The same turns by rollout, with ids and log-probs."""
        commands = [
            ("LRANGE", keys.rollout_keys(run_id, name)[1] + turn.turn_id, 0, -1)
            for name, of_rollout in turns.items()
            for turn in of_rollout
        ]
        chunks = iter(await self._scripts.read(commands))
        return {
            name: [codec.with_chunks(turn, next(chunks)) for turn in of_rollout]
            for name, of_rollout in turns.items()
        }

    async def _with_routed(
        self, run_id: str, turns: Mapping[str, list[Turn]]
    ) -> dict[str, list[Turn]]:
        """The same turns by rollout, with their routed experts."""
        names = [keys.routed_key(run_id, name) for name in turns]
        stored = await self._scripts.read([("HGETALL", name) for name in names])
        return {
            name: codec.with_routed(records, found) if found else records
            for (name, records), found in zip(turns.items(), stored, strict=True)
        }

    async def record(
        self, run_id: str, recorded: Sequence[tuple[Rollout, Sequence[Turn]]]
    ) -> list[bool]:
        """Store whole finished rollouts; False for those stored before. Idempotent.

        Raises:
            ServiceError: ALREADY_EXISTS with other content.
        """
        parts = [
            (
                keys.rollout_keys(run_id, rollout.rollout_id),
                codec.record_args(rollout, turns),
            )
            for rollout, turns in recorded
        ]
        replies = await self._scripts.call_each("record_rollout", parts)
        return [bool(unwrap(reply)[0]) for reply in replies]

    async def _headers(self, run_id: str, rollout_ids: Sequence[str]) -> list[_Header]:
        """Each rollout's whole header; empty: unknown."""
        names = [keys.rollout_keys(run_id, name)[0] for name in rollout_ids]
        return await self._scripts.read([("HGETALL", name) for name in names])

    async def _fields(self, run_id: str, rollout_id: str, names: Sequence[str | bytes]) -> _Header:
        """Those of the named fields that the header has, and its state; empty: unknown."""
        fields = ("state", *names)
        header = keys.rollout_keys(run_id, rollout_id)[0]
        (values,) = await self._scripts.read([("HMGET", header, *fields)])
        if values[0] is None:
            return {}
        return _known(fields, values)

    async def _call(self, script: str, run_id: str, rollout_id: str, *args: Any) -> list[Any]:
        reply = await self._scripts.call(
            script, keys=keys.rollout_keys(run_id, rollout_id), args=(rollout_id, *args)
        )
        return unwrap(reply)


def _appended(reply: Any) -> Appended | ServiceError:
    if isinstance(reply, ServiceError):
        return reply
    return reply_error(reply) if reply[0] == _ERROR else Appended(*reply)


def _closed(run_id: str, rollout_id: str, reply: Any) -> tuple[Rollout, list[Turn]] | ServiceError:
    if isinstance(reply, ServiceError):
        return reply
    if reply[0] == _ERROR:
        return reply_error(reply)
    header = _pairs(reply[1])
    return codec.rollout(run_id, rollout_id, header), codec.turns(header)


def _known(names: Sequence[str | bytes], values: Sequence[bytes | None]) -> _Header:
    return {
        name.encode() if isinstance(name, str) else name: value
        for name, value in zip(names, values, strict=True)
        if value is not None
    }


def _pairs(reply: Sequence[bytes]) -> _Header:
    return dict(zip(reply[::2], reply[1::2], strict=True))
