"""The life of one turn: begin, then generate, record and forward until it is over, then end.

There is one way to go on. Whatever ends a stream of tokens (new weights, a moved node, a killed
server), the turn continues from its recorded prefix on whichever server may serve it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import DeadlineError, InvalidRequestError, decode
from seamflow.retry import Backoff
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway.calls import forwarded
from rollout.gateway.dispatch.length_estimators import Beginning, remaining
from rollout.gateway.dispatch.policies import Ask
from rollout.gateway.dispatch.server_pool import Servers
from rollout.gateway.dispatch.server_state import Server
from rollout.gateway.prompt.prompt import Prompt
from rollout.gateway.record import token_messages
from rollout.gateway.record.recorder import finish_rollout
from services.chassis import metrics
from services.chassis.errors import Reason, deadline_exceeded, failed_precondition
from services.chassis.log import get_logger

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

__all__ = ["Begin", "Record", "Send", "Turn"]

Begin = Callable[[store_pb.NewTurn], Awaitable[store_pb.NewTurnResult]]
"""Opens the turn in the store."""
Record = Callable[[store_pb.TokenAppend], Awaitable[object]]
"""Stores tokens, and with them perhaps the turn's end; returns when they are acknowledged."""
Send = Callable[[pb.GenerateResponse], None]
"""Hands an event over to whoever brings it to the agent."""

_log = get_logger()

_ENDED = (tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH)
_RESUMED = metrics.counter(
    "rollout_gateway", "turns_continued_total", "Streams continued from a recorded prefix."
)
_FORWARDED = metrics.counter(
    "rollout_gateway", "tokens_forwarded_total", "Sampled tokens sent to agents."
)
_DRIFTED = metrics.counter(
    "rollout_gateway", "drifted_turns_total", "Turns whose prompt re-tokenised sampled tokens."
)


class Turn:
    """One call of Generate."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        prompt: Prompt,
        attempt_id: str,
        store: TrajectoryServiceAsyncStub,
        servers: Servers,
        begin: Begin,
        record: Record,
        send: Send,
        deadline: float | None,
    ) -> None:
        """`deadline` is the agent's, in seconds of the event loop's clock."""
        self._request = request
        self._prompt = prompt
        self._attempt_id = attempt_id
        self._store = store
        self._servers = servers
        self._begin_turn = begin
        self._record = record
        self._send = send
        self._deadline = deadline
        self._epoch = 0
        self._pinned: int | None = None
        self._required_weight_version = 0
        self._num_streams = 0  # opened so far
        self._prompt_ids: list[int] = []  # shared prefix and this turn's environment tokens
        self._sampled: list[int] = []
        self._num_stored = 0  # tokens of this turn in the store, environment ones included
        # The prompt is recorded with the first sampled tokens: nobody needs it before.
        self._unrecorded = tokens_pb2.Tokens()
        self._finish = tokens_pb2.FINISH_REASON_UNSPECIFIED
        self._drift: trajectory_pb2.Drift | None = None
        self._is_closed = False  # in the store

    async def run(self) -> None:
        """Send what the agent gets: recorded tokens, then new ones, then the end."""
        offset = self._request.resume_from_offset
        unseen = token_messages.after(await self._begin(), offset)
        if unseen.token_ids:
            self._send(_chunk(unseen, offset))
        self._finish = self._finish or self._finish_by_tokens()
        while self._finish not in _ENDED:
            await self._continue()
        if not self._is_closed:
            await self._append(tokens_pb2.Tokens())
        self._send(self._finished())

    async def _begin(self) -> tokens_pb2.Tokens:
        """Open the turn in the store; returns the sampled tokens it already has."""
        begin = self._prompt.begin_request(self._request, self._attempt_id)
        # Asked now, so that the answer comes while the store opens the turn.
        self._servers.lengths.foresee(self._beginning(self._prompt.known_ids()))
        answer = await self._begin_turn(begin)
        self._epoch, self._finish = answer.epoch, answer.finish_reason
        self._is_closed = self._finish in _ENDED
        self._note_drift(self._prompt.drift(answer))
        if answer.HasField("pinned_weight_version"):
            self._pinned = answer.pinned_weight_version
        self._required_weight_version = answer.required_weight_version
        stored = answer.tokens
        self._num_stored = len(stored.token_ids)
        if not stored.token_ids:
            stored = self._unrecorded = token_messages.environment(
                self._prompt.remaining_ids(answer)
            )
        num_environment = token_messages.num_environment(stored)
        self._prompt_ids = [*answer.prefix_token_ids, *stored.token_ids[:num_environment]]
        self._sampled = list(stored.token_ids[num_environment:])
        self._servers.lengths.foresee(self._beginning(self._prompt_ids))
        await self._check_nothing_lost()
        return token_messages.after(stored, num_environment)

    async def _check_nothing_lost(self) -> None:
        given, kept = self._request.resume_from_offset, len(self._sampled)
        if given <= kept:
            return
        message = (
            f"the caller has {given} sampled tokens, the store only {kept}: the store lost some"
        )
        await finish_rollout(self._store, self._prompt.failure(self._request, message))
        raise failed_precondition(Reason.OFFSET_GAP, f"{message}; the rollout has failed")

    async def _continue(self) -> None:
        """Sample on one server until the turn or the stream is over."""
        ask, num_before = self._ask(), len(self._sampled)
        try:
            async with self._servers.stream(ask, self._pinned, self._server_request) as stream:
                async for response in stream:
                    self._finish = response.finish_reason
                    if response.tokens.token_ids:
                        await self._record_then_forward(response.tokens)
            if self._finish not in _ENDED and len(self._sampled) == num_before:
                self._servers.suspect(stream.server)
        except grpc.aio.AioRpcError as error:
            await self._given_up(stream.server, error)
        except (asyncio.CancelledError, grpc.aio.UsageError):
            _raise_if_cancelled()  # else the server has left and its channel is closed
        if self._finish in _ENDED:
            self._servers.lengths.ended(self._beginning(self._prompt_ids), len(self._sampled))
        else:
            _RESUMED.inc()

    async def _given_up(self, server: Server, error: grpc.aio.AioRpcError) -> None:
        """A broken stream is no end; a request that the server refuses is the agent's to mend."""
        refusal = decode(error)
        if isinstance(refusal, InvalidRequestError):
            raise forwarded(refusal)
        if isinstance(refusal, DeadlineError) and self._deadline is not None:
            raise deadline_exceeded("the agent's deadline passed during its turn")
        self._servers.suspect(server)
        await Backoff().wait(refusal.retry_after)

    async def _record_then_forward(self, new: tokens_pb2.Tokens) -> None:
        offset = len(self._sampled)
        self._sampled.extend(new.token_ids)
        await self._append(new)
        _FORWARDED.inc(len(new.token_ids))
        self._send(_chunk(new, offset))

    async def _append(self, new: tokens_pb2.Tokens) -> None:
        """Record tokens; the last ones end the turn."""
        if self._unrecorded.token_ids:
            new = token_messages.joined(self._unrecorded, new)
        append = store_pb.TokenAppend(
            run_id=self._request.run_id,
            rollout_id=self._request.rollout_id,
            turn_id=self._request.turn_id,
            epoch=self._epoch,
            offset=self._num_stored,
            tokens=token_messages.packed(new),
        )
        ends = self._finish in _ENDED
        if ends:
            append.finish_reason = self._finish
            append.message_key = self._prompt.answer_key(self._text())
            if self._drift is not None:
                append.drift.CopyFrom(self._drift)
        await self._record(append)
        self._num_stored += len(new.token_ids)
        self._unrecorded.Clear()
        self._is_closed = ends

    def _note_drift(self, drift: trajectory_pb2.Drift | None) -> None:
        self._drift = drift
        if drift is None or self._is_closed:  # told when the turn ran
            return
        _DRIFTED.inc()
        names = {name: getattr(self._request, name) for name in ("run_id", "rollout_id", "turn_id")}
        _log.warning("drift", **names, position=drift.position)

    def _text(self) -> str:
        return self._prompt.template.decode(self._sampled)

    def _finish_by_tokens(self) -> tokens_pb2.FinishReason.ValueType:
        """The end of a turn whose last attempt died between its last token and its end."""
        sampling = self._request.sampling
        if self._sampled and self._sampled[-1] in self._prompt.stop_token_ids(sampling):
            return tokens_pb2.FINISH_REASON_STOP
        if len(self._sampled) >= sampling.max_new_tokens:
            return tokens_pb2.FINISH_REASON_LENGTH
        return tokens_pb2.FINISH_REASON_UNSPECIFIED

    def _server_request(self) -> tuple[server_pb.GenerateTokensRequest, float | None]:
        sampling = tokens_pb2.SamplingParams()
        sampling.CopyFrom(self._request.sampling)
        sampling.max_new_tokens -= len(self._sampled)
        self._num_streams += 1
        wanted = server_pb.GenerateTokensRequest(
            run_id=self._request.run_id,
            request_id=f"{self._request.turn_id}/{self._attempt_id}/{self._num_streams}",
            token_ids=[*self._prompt_ids, *self._sampled],
            sampling=sampling,
            chunk_interval=self._chunk_interval(),
        )
        if self._deadline is None:
            return wanted, None
        return wanted, max(self._deadline - asyncio.get_running_loop().time(), 0.0)

    def _chunk_interval(self) -> Duration | None:
        """As the agent says; but a turn that may be hedged shows at once that it has begun."""
        return None if self._servers.hedges else self._request.chunk_interval

    def _ask(self) -> Ask:
        beginning, num_sampled = self._beginning(self._prompt_ids), len(self._sampled)
        most = self._request.sampling.max_new_tokens - num_sampled
        expected = self._servers.lengths.expected(beginning)
        return Ask(
            group=beginning.group,
            rollout=self._request.rollout_id,
            num_tokens=len(self._prompt_ids) + num_sampled,
            max_new_tokens=most,
            expected_tokens=remaining(expected, num_sampled, most),
            continues=bool(num_sampled or self._num_streams),
            required_weight_version=self._required_weight_version,
        )

    def _beginning(self, token_ids: Sequence[int]) -> Beginning:
        # A leased rollout is named task/slot/attempt.
        task_id, _, _ = self._request.rollout_id.rpartition("/")[0].rpartition("/")
        return Beginning(
            group=task_id or self._request.rollout_id,
            token_ids=token_ids,
            turn_index=self._prompt.num_answers,
        )

    def _finished(self) -> pb.GenerateResponse:
        finish = pb.TurnEnd(
            finish_reason=self._finish,
            text=self._text(),
            num_prompt_tokens=len(self._prompt_ids),
            num_sampled_tokens=len(self._sampled),
        )
        if self._drift is not None:
            finish.drift.position = self._drift.position
            finish.drift.recorded_text = self._drift.recorded_text
            finish.drift.retokenized_text = self._drift.retokenized_text
        return pb.GenerateResponse(end=finish)


def _raise_if_cancelled() -> None:
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _chunk(new: tokens_pb2.Tokens, offset: int) -> pb.GenerateResponse:
    event = pb.GenerateResponse()
    event.chunk.offset = offset
    event.chunk.tokens.CopyFrom(new)
    return event
