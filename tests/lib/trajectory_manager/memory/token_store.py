"""In-memory TokenStore: the reference the Redis one is tested against."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import ServiceError
from trajectory_manager.model.records import FailureClass, Outcome, Purpose, Rollout, RolloutState
from trajectory_manager.model.tokens import (
    Appended,
    Cut,
    Origin,
    RolloutFinish,
    RoutedExperts,
    Span,
    Tokens,
    Turn,
    VersionSource,
)
from trajectory_manager.store.errors import store_error
from trajectory_manager.store.redis.token_store import TokenStore

_TEMPLATE = "template_fingerprint"
GAP_MESSAGE = "tokens before an appended chunk are missing"


@dataclass(slots=True)
class _Writer:
    """A turn and who writes it."""

    turn: Turn
    attempt_id: str
    tokens: Tokens = field(default_factory=Tokens)
    routed: dict[int, RoutedExperts] = field(default_factory=dict)


@dataclass(slots=True)
class _Record:
    """A rollout and its turns in the order they began."""

    rollout: Rollout
    turns: dict[str, _Writer] = field(default_factory=dict)


class MemoryTokenStore(TokenStore):
    """Implements `TokenStore`; nothing survives the process."""

    def __init__(self, clock: Callable[[], float], incarnation: int) -> None:
        """`clock` gives Unix seconds; `incarnation` differs between any two starts."""
        self._clock = clock
        self._incarnation = incarnation
        self._records: dict[tuple[str, str], _Record] = {}

    def restart(self) -> None:
        """Fence every writer, as a start of a server on the same data does."""
        self._incarnation += 1

    async def start_rollout(self, rollout: Rollout, *, leased: bool) -> None:
        """See `TokenStore`."""
        key = (rollout.run_id, rollout.rollout_id)
        record = self._records.get(key)
        if record is None:
            self._records[key] = _Record(replace(rollout, create_time=self._clock()))
            return
        _require_running(record)
        may_change = leased and not record.turns
        stored = record.rollout
        wanted = replace(rollout, create_time=stored.create_time)
        if may_change:
            stored = replace(stored, credential_digest=wanted.credential_digest)
        wanted = replace(wanted, traceparent=stored.traceparent, labels=stored.labels)
        if stored != wanted:
            raise store_error("OTHER_ROLLOUT", rollout.rollout_id)
        record.rollout = stored

    async def begin_turn(
        self, run_id: str, rollout_id: str, credential_digest: str, begin: Turn
    ) -> tuple[Rollout, Turn]:
        """See `TokenStore`."""
        record = self._record(run_id, rollout_id)
        writer = self._opened(record, rollout_id, credential_digest, begin)
        return record.rollout, replace(writer.turn, tokens=writer.tokens)

    async def begin_first_turn(
        self, run_id: str, rollout_id: str, credential_digest: str, begin: Turn
    ) -> tuple[Rollout, Turn] | None:
        """See `TokenStore`."""
        record = self._record(run_id, rollout_id)
        if record.rollout.credential_digest != credential_digest:
            raise store_error("BAD_CREDENTIAL", rollout_id)
        if record.turns and begin.turn_id not in record.turns:
            return None
        return await self.begin_turn(run_id, rollout_id, credential_digest, begin)

    def _opened(
        self, record: _Record, rollout_id: str, credential_digest: str, begin: Turn
    ) -> _Writer:
        if record.rollout.credential_digest != credential_digest:
            raise store_error("BAD_CREDENTIAL", rollout_id)
        writer = record.turns.get(begin.turn_id)
        if writer is not None and (differs := _difference(writer.turn, begin)):
            raise store_error("OTHER_TURN", begin.turn_id, differs)
        if writer is not None and writer.turn.finish_reason:
            return writer
        _require_running(record)
        if writer is None:
            turn = replace(begin, epoch=self._incarnation << 32 | 1)
            writer = record.turns[begin.turn_id] = _Writer(turn, begin.attempt_id)
            return writer
        epoch = writer.turn.epoch
        if not self._is_current(epoch):
            epoch = self._incarnation << 32 | 1
        elif writer.attempt_id != begin.attempt_id:
            epoch += 1
        writer.attempt_id, writer.turn = begin.attempt_id, replace(writer.turn, epoch=epoch)
        return writer

    def _is_current(self, epoch: int) -> bool:
        return epoch >> 32 == self._incarnation

    async def append(self, appends: Sequence[pb.TokenAppend]) -> list[Appended | ServiceError]:
        """See `TokenStore`."""
        refused: dict[tuple[str, str, str], ServiceError] = {}
        answers: list[Appended | ServiceError] = []
        for append in appends:
            turn = (append.run_id, append.rollout_id, append.turn_id)
            answer = refused.get(turn) or self._append(append)
            if isinstance(answer, ServiceError):
                refused[turn] = answer
            answers.append(answer)
        return answers

    def _append(self, append: pb.TokenAppend) -> Appended | ServiceError:
        try:
            record, writer = self._fenced(append)
            if self._is_repeated(record, writer, append):
                return Appended(num_tokens=writer.tokens.num_tokens, num_new=0)
            return self._grown(record, writer, append)
        except ServiceError as error:
            return error

    def _is_repeated(self, record: _Record, writer: _Writer, append: pb.TokenAppend) -> bool:
        """Whether the turn ended exactly as `append` would end it; raises for late appends."""
        turn = writer.turn
        if not turn.finish_reason or not append.finish_reason:
            _require_running(record)
            if turn.finish_reason:
                raise store_error("ENDED_TURN", append.turn_id)
            return False
        end = (append.finish_reason, append.message_key, _drift(append))
        if (turn.finish_reason, turn.answer_key, turn.drift) != end:
            raise store_error("OTHER_END", append.turn_id)
        if self._overlap(record, writer, append) < _tokens(append).num_tokens:
            raise store_error("ENDED_TURN", append.turn_id)
        return True

    def _grown(self, record: _Record, writer: _Writer, append: pb.TokenAppend) -> Appended:
        tokens = _tokens(append)
        overlap = self._overlap(record, writer, append)
        writer.tokens = writer.tokens.joined(tokens.cut(overlap, tokens.num_tokens))
        if append.HasField("routed_experts"):
            given = append.routed_experts
            sizes = (given.start, given.num_tokens, given.num_layers, given.num_chosen)
            routed = RoutedExperts(*sizes, given.experts)
            kept = writer.routed.get(routed.start, routed)
            longer = max(kept, routed, key=lambda record: len(record.experts))
            writer.routed[routed.start] = longer
        if append.finish_reason:
            writer.turn = replace(
                writer.turn,
                finish_reason=append.finish_reason,
                answer_key=append.message_key,
                drift=_drift(append),
            )
        return Appended(num_tokens=writer.tokens.num_tokens, num_new=tokens.num_tokens - overlap)

    def _overlap(self, record: _Record, writer: _Writer, append: pb.TokenAppend) -> int:
        """How many of the tokens are stored already; raises for different tokens and for a gap."""
        stored = writer.tokens.num_tokens
        offset = append.offset
        if offset > stored and writer.turn.finish_reason:
            raise store_error("ENDED_TURN", append.turn_id)
        if offset > stored:
            outcome = Outcome(
                failure_class=FailureClass.INFRASTRUCTURE, failure_message=GAP_MESSAGE
            )
            record.rollout = self._closed(record.rollout, outcome)
            raise store_error("GAP", append.turn_id, offset, stored)
        overlap = min(stored - offset, _tokens(append).num_tokens)
        old, new = writer.tokens.cut(offset, offset + overlap), _tokens(append).cut(0, overlap)
        if (old.ids, old.logprobs) != (new.ids, new.logprobs):
            raise store_error("OTHER_TOKENS", append.turn_id, offset)
        return overlap

    async def finish(
        self, run_id: str, finishes: Sequence[RolloutFinish]
    ) -> list[tuple[Rollout, list[Turn]] | ServiceError]:
        """See `TokenStore`."""
        return [
            self._close(run_id, finish.rollout_id, finish.credential_digest, finish.outcome)
            for finish in finishes
        ]

    def _close(
        self, run_id: str, rollout_id: str, credential_digest: str | None, outcome: Outcome
    ) -> tuple[Rollout, list[Turn]] | ServiceError:
        record = self._records.get((run_id, rollout_id))
        if record is None:
            if credential_digest is not None:
                return store_error("UNKNOWN_ROLLOUT", rollout_id)
            given_up = Rollout(
                run_id=run_id,
                rollout_id=rollout_id,
                purpose=Purpose.TRAIN,
                create_time=self._clock(),
            )
            record = self._records[run_id, rollout_id] = _Record(given_up)
        elif credential_digest not in (None, record.rollout.credential_digest):
            return store_error("BAD_CREDENTIAL", rollout_id)
        if record.rollout.state is RolloutState.RUNNING:
            record.rollout = self._closed(record.rollout, outcome)
        closed = self._read(run_id, rollout_id, spans_only=True)
        assert closed is not None, "a closed rollout is there"
        return closed

    async def rollout(self, run_id: str, rollout_id: str) -> Rollout | None:
        """See `TokenStore`."""
        record = self._records.get((run_id, rollout_id))
        return record.rollout if record else None

    async def turns(self, run_id: str, rollout_id: str) -> list[Turn]:
        """See `TokenStore`."""
        record = self._records.get((run_id, rollout_id))
        return [writer.turn for writer in record.turns.values()] if record else []

    async def newest_turn(self, run_id: str, rollout_id: str) -> Turn | None:
        """See `TokenStore`."""
        record = self._records.get((run_id, rollout_id))
        if record is None or not record.turns:
            return None
        writer = next(reversed(record.turns.values()))
        return replace(writer.turn, tokens=writer.tokens)

    async def tokens(self, run_id: str, rollout_id: str, turn_ids: Sequence[str]) -> list[Tokens]:
        """See `TokenStore`."""
        turns = self._record(run_id, rollout_id).turns if turn_ids else {}
        if unknown := [turn_id for turn_id in turn_ids if turn_id not in turns]:
            raise store_error("UNKNOWN_TURN", unknown[0])
        return [turns[turn_id].tokens for turn_id in turn_ids]

    async def windows(self, run_id: str, rollout_id: str, cuts: Sequence[Cut]) -> list[Tokens]:
        """See `TokenStore`."""
        turns = self._record(run_id, rollout_id).turns
        return [
            turns[turn_id].tokens.cut(start, stop)._replace(spans=())
            for turn_id, start, stop in cuts
        ]

    async def read(
        self, run_id: str, rollout_ids: Sequence[str], *, spans_only: bool = False
    ) -> list[tuple[Rollout, list[Turn]] | None]:
        """See `TokenStore`."""
        return [self._read(run_id, name, spans_only) for name in rollout_ids]

    def _read(
        self, run_id: str, rollout_id: str, spans_only: bool
    ) -> tuple[Rollout, list[Turn]] | None:
        record = self._records.get((run_id, rollout_id))
        if record is None:
            return None
        turns = [
            replace(
                writer.turn,
                tokens=Tokens(spans=writer.tokens.spans) if spans_only else writer.tokens,
                routed=() if spans_only else tuple(sorted(writer.routed.values())),
            )
            for writer in record.turns.values()
        ]
        return record.rollout, turns

    async def record(
        self, run_id: str, recorded: Sequence[tuple[Rollout, Sequence[Turn]]]
    ) -> list[bool]:
        """See `TokenStore`."""
        return [self._recorded(rollout, turns) for rollout, turns in recorded]

    def _recorded(self, rollout: Rollout, turns: Sequence[Turn]) -> bool:
        key = (rollout.run_id, rollout.rollout_id)
        writers = {turn.turn_id: _Writer(turn, "-", turn.tokens) for turn in turns}
        known = self._records.get(key)
        if known is None:
            now = self._clock()
            self._records[key] = _Record(
                replace(rollout, create_time=now, finish_time=now), writers
            )
            return True
        wanted = replace(
            rollout,
            create_time=known.rollout.create_time,
            finish_time=known.rollout.finish_time,
        )
        if known.turns != writers or known.rollout != wanted:
            raise store_error("OTHER_ROLLOUT", rollout.rollout_id)
        return False

    def delete(self, run_id: str, rollout_id: str) -> int:
        """Drop a rollout; return how many tokens it had."""
        record = self._records.pop((run_id, rollout_id))
        return sum(writer.tokens.num_tokens for writer in record.turns.values())

    def delete_run(self, run_id: str) -> int:
        """Drop all rollouts of a run; return how many."""
        names = [key for key in self._records if key[0] == run_id]
        for key in names:
            del self._records[key]
        return len(names)

    def _record(self, run_id: str, rollout_id: str) -> _Record:
        record = self._records.get((run_id, rollout_id))
        if record is None:
            raise store_error("UNKNOWN_ROLLOUT", rollout_id)
        return record

    def _fenced(self, append: pb.TokenAppend) -> tuple[_Record, _Writer]:
        record = self._record(append.run_id, append.rollout_id)
        writer = record.turns.get(append.turn_id)
        if writer is None:
            raise store_error("UNKNOWN_TURN", append.turn_id)
        fenced = not (writer.turn.finish_reason or self._is_current(append.epoch))
        if writer.turn.epoch != append.epoch or fenced:
            raise store_error("STALE_TURN", append.turn_id, append.epoch, writer.turn.epoch)
        return record, writer

    def _closed(self, rollout: Rollout, outcome: Outcome) -> Rollout:
        return replace(rollout, state=outcome.state, outcome=outcome, finish_time=self._clock())


def _tokens(append: pb.TokenAppend) -> Tokens:
    spans = (
        Span(
            span.num_tokens,
            Origin(span.origin),
            span.weight_version,
            VersionSource(span.version_source),
            span.server_id,
        )
        for span in append.tokens.spans
    )
    return Tokens(append.tokens.token_ids, append.tokens.logprobs, tuple(spans))


def _drift(append: pb.TokenAppend) -> str:
    if not append.HasField("drift"):
        return ""
    drift = append.drift
    return json.dumps([drift.position, drift.recorded_text, drift.retokenized_text])


def _difference(known: Turn, given: Turn) -> str:
    """In what a call differs from the one that began the turn; empty: nothing."""
    if known.prompt_digest != given.prompt_digest:
        return "prompt"
    if known.sampling != given.sampling:
        return "sampling"
    return "" if known.template_fingerprint == given.template_fingerprint else _TEMPLATE


def _require_running(record: _Record) -> None:
    if record.rollout.state is not RolloutState.RUNNING:
        state = int(record.rollout.state)
        raise store_error("FINISHED_ROLLOUT", record.rollout.rollout_id, state)
