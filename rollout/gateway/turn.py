"""One turn: begin, then stream, record and forward tokens until it ends, then close.

A stream may end before its turn (new weights, a moved node, a killed server, an answer that
`CheckedStream` refuses). The turn then continues from its recorded prefix on any server that may
serve it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway.dispatch.checked_stream import (
    CheckedStream,
    TurnFailures,
    add_experts,
    is_empty_answer,
)
from rollout.gateway.dispatch.length_estimators import LengthQuery, remaining_tokens
from rollout.gateway.dispatch.policies import TurnRequest
from rollout.gateway.dispatch.server_pool import ServerPool
from rollout.gateway.prompt.conversation import answer_message
from rollout.gateway.prompt.prompt import Prompt, TurnTexts
from rollout.gateway.prompt.prompt_lanes import PromptLanes
from rollout.gateway.record import packed_tokens
from rollout.gateway.record.recorder import Recorder, TurnOpener
from rollout.gateway.record.turn_record import TurnRecord
from services.chassis import metrics
from services.chassis.errors import Reason, failed_precondition
from services.chassis.log import get_logger
from services.chassis.rpc import tracing
from services.lib.token_bytes import unpack_ids

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

    from rollout.gateway.dispatch.server_state import Server

Send = Callable[[pb.TokenChunk | pb.TurnEnd], None]
"""Takes an event for the agent; the event must not be used again."""

_log = get_logger()

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
    recorder: Recorder
    """Records tokens; its acknowledgement is what a turn waits for before it forwards them."""
    servers: ServerPool
    lanes: PromptLanes
    """Threads that render and encode prompts."""
    clock: Callable[[], float]
    """Seconds of the event loop; deadlines are on it."""


async def run_turn(
    request: pb.GenerateRequest,
    begin: store_pb.NewTurn,
    prompt: Prompt,
    services: TurnServices,
    deadline: float | None,
    send: Send,
) -> None:
    """Send the recorded tokens that the agent lacks, then new ones, then the turn's end.

    Args:
        request: of the agent, checked.
        begin: opens the turn in the store.
        prompt: what the messages or ids of the request were made to.
        services: of the gateway.
        deadline: of the agent, in seconds of `TurnServices.clock`; None: it has set none.
        send: takes the events.

    Raises:
        ServiceError: the store refused the turn, the prompt does not continue its record, the store
            has lost tokens, or the turn cannot go on.
    """
    with tracing.rollout_span("turn", request.run_id, request.rollout_id, turn_id=request.turn_id):
        begun = await services.opener.begin(begin)
        # What follows the recorded prefix is rendered and encoded.
        record = await services.lanes.run(
            begin.credential_digest,
            request.ByteSize(),
            lambda: TurnRecord(begin, prompt, begun, services.recorder),
        )
        await Turn(request, record, services, deadline).run(send)


class Turn:
    """A turn that is open in the store; its record goes on from what the store has."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        record: TurnRecord,
        services: TurnServices,
        deadline: float | None,
    ) -> None:
        self._request = request
        self._record = record
        self._prompt = record.prompt
        self._begun = record.begun
        self._services = services
        self._deadline = deadline
        self._num_streams = 0  # opened so far
        self._failures = TurnFailures(services.servers.outliers)
        self._texts = self._open_texts()

    async def run(self, send: Send) -> None:
        """Send what the agent lacks, go on until the turn has ended, and close it."""
        self._report_drift()
        self._services.servers.lengths.prefetch(self._length_query())
        await self._check_nothing_lost()
        self._forward(self._unreceived(), send)
        while not self._record.has_ended:
            await self._go_on(send)
        await self._record.close()
        send(await self._end_event())

    async def _go_on(self, send: Send) -> None:
        """Record, then forward, what one server samples, until the turn or the stream ends."""
        stream = CheckedStream(
            self._turn_request(),
            self._server_request,
            self._services.servers,
            self._failures,
            self._prompt.template.model_vocabulary_size,
        )
        async with aclosing(stream.responses()) as responses:
            async for server, response in responses:
                kept = await self._until_stop(server, response)
                await self._record.append(kept)
                self._forward(kept.tokens, send)
                if self._record.has_ended:
                    self._observe_end(server)
                    break

    def _observe_end(self, server: Server) -> None:
        """Tell of the sampled turn: its length, and that its server has ended it."""
        servers = self._services.servers
        servers.lengths.observe(self._length_query(), self._num_sampled)
        is_empty = is_empty_answer(self._record.finish_reason, self._num_sampled)
        is_empty = is_empty and not self._prompt.constraint.opening
        servers.outliers.answered(server, is_empty=is_empty)

    def _open_texts(self) -> TurnTexts | None:
        """Texts for an agent that asked for them, after those that it has received."""
        if not self._request.stream_text:
            return None
        texts = TurnTexts(self._prompt, self._request.sampling.stop)
        if received := self._request.resume_from_offset:
            texts.push(self._record.sampled_ids[:received])
        return texts

    def _unreceived(self) -> tokens_pb2.PackedTokens:
        """Sampled tokens that the store had from `resume_from_offset` on."""
        stored = self._begun.tokens
        sampled = packed_tokens.after(stored, packed_tokens.num_environment(stored))
        return packed_tokens.after(sampled, self._request.resume_from_offset)

    async def _until_stop(
        self, server: Server, response: server_pb.GenerateTokensResponse
    ) -> server_pb.GenerateTokensResponse:
        """The response up to the token that completes a stop string or a forced answer."""
        record = self._record
        ids = unpack_ids(response.tokens.token_ids)
        ends = (
            None if record.answer_end is None else record.answer_end.num_until_end(ids),
            record.stop_strings.num_until_next(ids),
        )
        number = min((each for each in ends if each is not None), default=None)
        if number is None:
            return response
        kept = server_pb.GenerateTokensResponse(
            tokens=packed_tokens.before(response.tokens, number),
            finish_reason=tokens_pb2.FINISH_REASON_STOP,
        )
        if response.HasField("routed_experts"):
            kept.routed_experts.CopyFrom(response.routed_experts)
        elif response.finish_reason != kept.finish_reason:
            await add_experts(kept, server, record)
        return kept

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

    def _forward(self, tokens: tokens_pb2.PackedTokens, send: Send) -> None:
        """Send recorded tokens, the last ones of the turn so far."""
        if not (number := packed_tokens.num_tokens(tokens)):
            return
        chunk = pb.TokenChunk(
            offset=self._num_sampled - number, num_prompt_tokens=len(self._record.prompt_ids)
        )
        chunk.tokens.MergeFromString(tokens.SerializeToString())  # they are equal on the wire
        ids = chunk.tokens.token_ids
        if self._request.return_token_bytes:
            chunk.token_bytes.extend(map(self._prompt.template.token_bytes, ids))
        if self._texts is not None:
            chunk.text, delta = self._texts.push(ids, last=self._record.has_ended)
            chunk.content_delta, chunk.reasoning_delta = delta.content, delta.reasoning
        send(chunk)
        _FORWARDED.inc(number)

    @property
    def _num_sampled(self) -> int:
        return self._record.num_sampled

    def _turn_request(self) -> TurnRequest:
        query, is_pinned = self._length_query(), self._begun.HasField("pinned_weight_version")
        max_new_tokens = self._request.sampling.max_new_tokens - self._num_sampled
        predicted = self._services.servers.lengths.predict(query)
        return TurnRequest(
            group=query.group,
            rollout=self._request.rollout_id,
            num_tokens=len(self._record.prompt_ids) + self._num_sampled,
            max_new_tokens=max_new_tokens,
            expected_tokens=remaining_tokens(predicted, self._num_sampled, max_new_tokens),
            continues=bool(self._num_sampled or self._num_streams),
            num_sampled=self._num_sampled,
            required_weight_version=self._begun.required_weight_version,
            pinned_weight_version=self._begun.pinned_weight_version if is_pinned else None,
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
            attempt_id=f"{self._record.begin.turn_id}/{self._record.begin.attempt_id}"
            f"/{self._num_streams}",
            token_ids=self._record.packed_ids,
            sampling=sampling,
            chunk_interval=self._request.chunk_interval,
            routed_experts_from=self._record.routed_from,
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
                self._record.begin.credential_digest,
                self._request.ByteSize(),
                lambda: constraint.schema_check(record.answer),
            )
        return pb.TurnEnd(
            finish_reason=record.finish_reason,
            message=answer_message(constraint.shown(record.answer.message)),
            raw_text=self._prompt.template.text(record.sampled_ids),
            parse_error=record.answer.error,
            num_prompt_tokens=len(record.prompt_ids),
            num_sampled_tokens=self._num_sampled,
            prefix_turn_id=record.prefix_turn_id,
            prefix_length=record.prefix_length,
            stop=record.stop or "",
            drift=record.drift,
            prompt_token_ids=record.prompt_ids if self._request.return_prompt_token_ids else (),
            opening="" if constraint.prefill else constraint.opening,
            tool_check=constraint.tool_check(record.answer),
            schema_check=schema_check,
        )
