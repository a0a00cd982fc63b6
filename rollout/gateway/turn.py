"""One turn: begin, then stream, record and forward tokens until it ends, then close.

A stream may end before its turn (new weights, a moved node, a killed server). The turn then
continues from its recorded prefix on any server that may serve it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import (
    DeadlineError,
    ExhaustedError,
    InvalidRequestError,
    SeamflowError,
    UnavailableError,
    decode,
)
from seamflow.retry import Backoff
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway.dispatch.answer_check import fault_of
from rollout.gateway.dispatch.length_estimators import LengthQuery, remaining_tokens
from rollout.gateway.dispatch.policies import TurnRequest
from rollout.gateway.dispatch.server_pool import ServerPool
from rollout.gateway.dispatch.server_state import Server
from rollout.gateway.dispatch.turn_failures import TurnFailures
from rollout.gateway.prompt.conversation import answer_message
from rollout.gateway.prompt.prompt import Prompt
from rollout.gateway.prompt.prompt_lanes import PromptLanes
from rollout.gateway.prompt.turn_texts import TurnTexts
from rollout.gateway.record import token_messages
from rollout.gateway.record.recorder import Recorder
from rollout.gateway.record.turn_opener import TurnOpener
from rollout.gateway.record.turn_record import TurnRecord
from rollout.gateway.send_buffer import SentChunk
from services.chassis import metrics
from services.chassis.errors import Reason, deadline_exceeded, failed_precondition
from services.chassis.log import get_logger
from services.chassis.rpc import tracing
from services.chassis.rpc.status import from_dependency
from services.lib.token_bytes import unpack_ids

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

__all__ = ["Send", "Turn", "TurnServices"]

Send = Callable[[SentChunk | pb.TurnEnd], None]
"""Takes an event for the agent; the event must not be used again."""

_log = get_logger()

_EMPTY_TOKENS = 1
"""An answer of at most this many tokens is empty: it has its end token alone."""
_CONTINUED = metrics.counter(
    "rollout_gateway", "turns_continued_total", "Streams continued from a recorded prefix."
)
_FORWARDED = metrics.counter(
    "rollout_gateway", "tokens_forwarded_total", "Sampled tokens sent to agents."
)
_DRIFTED = metrics.counter(
    "rollout_gateway", "drifted_turns_total", "Turns with retokenization drift in their prompt."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnServices:
    """What all turns of a gateway share."""

    store: TrajectoryServiceAsyncStub
    """The trajectory manager, for calls that are not batched."""
    opener: TurnOpener
    """Opens turns in the store."""
    recorder: Recorder
    """Records tokens; its acknowledgement is what a turn waits for before it forwards them."""
    servers: ServerPool
    """The rollout servers of the run."""
    lanes: PromptLanes
    """Threads that render and encode prompts."""
    clock: Callable[[], float]
    """Seconds of the event loop; deadlines are on it."""


class Turn:
    """One call of Generate."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        prompt: Prompt,
        begin: store_pb.NewTurn,
        services: TurnServices,
        deadline: float | None,
    ) -> None:
        """`begin` opens the turn; `deadline` is in seconds of `services.clock`; None for no end."""
        self._request = request
        self._prompt = prompt
        self._begin_request = begin
        self._services = services
        self._deadline = deadline
        self._num_streams = 0  # opened so far
        self._failures = TurnFailures(services.servers.outliers)
        self._server: Server | None = None  # of the newest stream
        self._begun: store_pb.BegunTurn
        self._record: TurnRecord
        self._texts: TurnTexts | None = None

    async def run(self, send: Send) -> None:
        """Send the recorded tokens that the agent lacks, then new ones, then the turn's end."""
        request = self._request
        with tracing.rollout_span(
            "turn", request.run_id, request.rollout_id, turn_id=request.turn_id
        ):
            await self._run(send)

    async def _run(self, send: Send) -> None:
        self._forward(await self._begin(), send)
        while not self._record.has_ended:
            async with aclosing(self._stream()) as responses:
                async for response in responses:
                    tokens, finish_reason = self._until_stop(response)
                    await self._record.append(tokens, finish_reason)
                    self._forward(tokens, send)
                    if self._record.has_ended:
                        self._observe_end()
                        break
        await self._record.close()
        send(await self._end_event())

    def _observe_end(self) -> None:
        """Tell of the sampled turn: its length, and that its server has ended it."""
        servers, record = self._services.servers, self._record
        servers.lengths.observe(self._length_query(), self._num_sampled)
        is_stop = record.finish_reason == tokens_pb2.FINISH_REASON_STOP
        if self._server is not None:
            is_short = self._num_sampled <= _EMPTY_TOKENS
            is_empty = is_stop and is_short and not self._prompt.constraint.opening
            servers.outliers.answered(self._server, is_empty=is_empty)

    async def _begin(self) -> tokens_pb2.PackedTokens:
        """Open the turn in the store; returns recorded tokens from `resume_from_offset` on."""
        begun = self._begun = await self._services.opener.begin(self._begin_request)
        # What follows the recorded prefix is rendered and encoded.
        self._record = await self._services.lanes.run(
            self._begin_request.credential_digest,
            self._request.ByteSize(),
            lambda: TurnRecord(
                self._begin_request,
                self._prompt,
                begun,
                self._services.store,
                self._services.recorder,
            ),
        )
        self._report_drift()
        self._services.servers.lengths.prefetch(self._length_query())
        await self._check_nothing_lost()
        start = token_messages.num_environment(begun.tokens)
        sampled = token_messages.after(begun.tokens, start)
        if self._request.stream_text:
            self._texts = TurnTexts(self._prompt, self._request.sampling.stop)
            if received := self._request.resume_from_offset:
                self._texts.push(self._record.sampled_ids[:received])
        return token_messages.after(sampled, self._request.resume_from_offset)

    def _until_stop(
        self, response: server_pb.GenerateTokensResponse
    ) -> tuple[tokens_pb2.PackedTokens, tokens_pb2.FinishReason.ValueType]:
        """The new tokens up to the one that completes a stop string, and why they end."""
        record = self._record
        ids = unpack_ids(response.tokens.token_ids)
        ends = (
            None if record.answer_end is None else record.answer_end.num_until_end(ids),
            record.stop_strings.num_until_next(ids),
        )
        number = min((each for each in ends if each is not None), default=None)
        if number is None:
            return response.tokens, response.finish_reason
        return token_messages.before(response.tokens, number), tokens_pb2.FINISH_REASON_STOP

    async def _check_nothing_lost(self) -> None:
        """Fail the rollout if the store has fewer tokens than the agent has received."""
        received, recorded = self._request.resume_from_offset, self._num_sampled
        if received <= recorded:
            return
        message = (
            f"the agent has {received} sampled tokens, the store only {recorded}: "
            "the store lost some"
        )
        await self._record.fail_rollout(message)
        raise failed_precondition(Reason.OFFSET_GAP, f"{message}; the rollout has failed")

    async def _stream(self) -> AsyncGenerator[server_pb.GenerateTokensResponse]:
        """Responses of one server, until the turn or the stream ends; failures of it are handled.

        Raises:
            ServiceError: the turn must not be retried on another server.
        """
        record, servers, num_before = self._record, self._services.servers, self._num_sampled
        try:
            async with servers.stream(
                self._turn_request(), self._pinned_version(), self._server_request
            ) as stream:
                self._server = stream.server
                async for response in stream.responses:
                    if self._is_of_another_version(response):
                        # It swapped since its last report: not recorded, another server goes on.
                        servers.suspect(stream.server)
                        return
                    if fault := self._fault_of(response):
                        self._handle_fault(stream.server, fault)
                        return  # not recorded either
                    if self._has_doubtful_end(stream.server, response):
                        return  # nor is this: another server is asked
                    if response.tokens.token_ids:
                        self._failures.answered()
                    yield response
            if not record.has_ended and self._num_sampled == num_before:
                servers.suspect(stream.server)
        except grpc.aio.AioRpcError as error:
            await self._handle_failure(stream.server, error)
        except (asyncio.CancelledError, grpc.aio.UsageError):
            _raise_if_cancelled()  # else the server left the run and its channel is closed
        if not record.has_ended:
            _CONTINUED.inc()

    async def _handle_failure(self, server: Server, error: grpc.aio.AioRpcError) -> None:
        """Raise what another server would answer too; else go on there after a while."""
        failure = decode(error)
        if isinstance(failure, DeadlineError) and self._deadline is not None:
            raise deadline_exceeded("the agent's deadline passed during its turn")
        if isinstance(failure, InvalidRequestError):
            if self._is_too_long(server, failure) or self._failures.add_verdict(
                server, str(failure)
            ):
                raise from_dependency(failure)
        elif self._services.servers.suspect(server) and _is_of_server(failure):
            self._failures.add(server, str(failure))
        await Backoff().wait(failure.retry_after)

    def _handle_fault(self, server: Server, fault: str) -> None:
        """Raise if several servers answer impossibly; else another one goes on."""
        if self._failures.add_verdict(server, fault):
            message = f"rollout servers give impossible answers: {fault}"
            raise failed_precondition(Reason.ENGINE_FAILED, message)

    def _has_doubtful_end(self, server: Server, response: server_pb.GenerateTokensResponse) -> bool:
        """Whether the answer is empty, of a server that has given no other; noted against it.

        Each server is doubted once: the second time its word counts.
        """
        outliers = self._services.servers.outliers
        number = self._num_sampled + token_messages.num_tokens(response.tokens)
        is_stop = response.finish_reason == tokens_pb2.FINISH_REASON_STOP
        is_believed = server.address in self._failures.avoided or not outliers.doubts_empty(server)
        if not is_stop or number > _EMPTY_TOKENS or is_believed:
            return False
        outliers.answered(server, is_empty=True)
        self._failures.add(server, "an empty answer, as all others before")
        return True

    def _fault_of(self, response: server_pb.GenerateTokensResponse) -> str:
        most = self._request.sampling.max_new_tokens - self._num_sampled
        return fault_of(response.tokens, self._prompt.template.model_vocabulary_size, most)

    def _is_too_long(self, server: Server, failure: InvalidRequestError) -> bool:
        """Whether other servers report too that the prompt does not fit."""
        if failure.reason != Reason.CONTEXT_LENGTH_EXCEEDED:
            return False
        num_tokens = len(self._record.prompt_ids) + self._num_sampled
        return self._services.servers.agree_too_long(server, num_tokens)

    def _forward(self, tokens: tokens_pb2.PackedTokens, send: Send) -> None:
        """Send recorded tokens, the last ones of the turn so far."""
        if number := token_messages.num_tokens(tokens):
            chunk = SentChunk(self._num_sampled - number, tokens)
            chunk.num_prompt_tokens = len(self._record.prompt_ids)
            ids = unpack_ids(tokens.token_ids)
            if self._request.return_token_bytes:
                chunk.token_bytes = [self._prompt.template.token_bytes(each) for each in ids]
            if self._texts is not None:
                chunk.text, chunk.delta = self._texts.push(ids, last=self._record.has_ended)
            send(chunk)
            _FORWARDED.inc(number)

    def _is_of_another_version(self, response: server_pb.GenerateTokensResponse) -> bool:
        """Whether tokens are of another version than the rollout is pinned to."""
        pinned = self._pinned_version()
        return pinned is not None and any(
            span.origin == tokens_pb2.ORIGIN_POLICY and span.weight_version != pinned
            for span in response.tokens.spans
        )

    def _pinned_version(self) -> int | None:
        is_pinned = self._begun.HasField("pinned_weight_version")
        return self._begun.pinned_weight_version if is_pinned else None

    @property
    def _num_sampled(self) -> int:
        return self._record.num_sampled

    def _turn_request(self) -> TurnRequest:
        query = self._length_query()
        max_new_tokens = self._request.sampling.max_new_tokens - self._num_sampled
        predicted = self._services.servers.lengths.predict(query)
        return TurnRequest(
            group=query.group,
            rollout=self._request.rollout_id,
            num_tokens=len(self._record.prompt_ids) + self._num_sampled,
            max_new_tokens=max_new_tokens,
            expected_tokens=remaining_tokens(predicted, self._num_sampled, max_new_tokens),
            continues=bool(self._num_sampled or self._num_streams),
            required_weight_version=self._begun.required_weight_version,
            avoided=self._failures.avoided,
        )

    def _server_request(self) -> tuple[server_pb.GenerateTokensRequest, float | None]:
        sampling = tokens_pb2.SamplingParams()
        sampling.CopyFrom(self._request.sampling)
        sampling.max_new_tokens -= self._num_sampled
        del sampling.stop[:]  # this gateway finds them
        self._num_streams += 1
        request = server_pb.GenerateTokensRequest(
            run_id=self._request.run_id,
            attempt_id=f"{self._begin_request.turn_id}/{self._begin_request.attempt_id}"
            f"/{self._num_streams}",
            token_ids=self._record.packed_ids,
            sampling=sampling,
            chunk_interval=self._request.chunk_interval,
        )
        if self._deadline is None:
            return request, None
        return request, max(self._deadline - self._services.clock(), 0.0)

    def _length_query(self) -> LengthQuery:
        return LengthQuery(
            group=self._begun.group_id or self._request.rollout_id,
            token_ids=self._record.prompt_ids,
            turn_index=self._prompt.num_answers,
        )

    def _report_drift(self) -> None:
        drift = self._record.drift
        if drift is None or self._record.is_closed:  # reported when the turn ran
            return
        _DRIFTED.inc()
        names = {name: getattr(self._request, name) for name in ("run_id", "rollout_id", "turn_id")}
        _log.warning("retokenization_drift", **names, position=drift.position)

    async def _end_event(self) -> pb.TurnEnd:
        record, constraint = self._record, self._prompt.constraint
        schema_check = None
        if constraint.schema is not None:
            schema_check = await self._services.lanes.run(
                self._begin_request.credential_digest,
                self._request.ByteSize(),
                lambda: constraint.schema_check(record.answer),
            )
        return pb.TurnEnd(
            finish_reason=record.finish_reason,
            message=answer_message(record.answer.message),
            raw_text=self._prompt.template.text(record.sampled_ids),
            parse_error=record.answer.error,
            num_prompt_tokens=len(record.prompt_ids),
            num_sampled_tokens=self._num_sampled,
            prefix_turn_id=record.prefix_turn_id,
            prefix_length=record.prefix_length,
            stop=record.stop or "",
            drift=record.drift,
            prompt_token_ids=record.prompt_ids if self._request.return_prompt_token_ids else (),
            opening=constraint.opening,
            tool_check=constraint.tool_check(record.answer),
            schema_check=schema_check,
        )


def _is_of_server(failure: SeamflowError) -> bool:
    """Whether a failure tells of a broken server, not of one that ends, restarts or is full."""
    if isinstance(failure, UnavailableError):
        return failure.reason not in (Reason.DRAINING, Reason.WEIGHTS_NOT_LOADED)
    return not isinstance(failure, ExhaustedError)


def _raise_if_cancelled() -> None:
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
