"""One turn: begin, then stream, record and forward tokens until it ends, then close.

A stream may end before its turn (new weights, a moved node, a killed server). The turn then
continues from its recorded prefix on any server that may serve it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import DeadlineError, InvalidRequestError, decode
from seamflow.retry import Backoff
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.dispatch.length_estimators import LengthQuery, remaining_tokens
from rollout.gateway.dispatch.policies import TurnRequest
from rollout.gateway.dispatch.server_pool import ServerPool
from rollout.gateway.dispatch.server_state import Server
from rollout.gateway.prompt.prompt import Prompt
from rollout.gateway.record import token_messages
from rollout.gateway.record.recorder import Recorder
from rollout.gateway.record.turn_opener import TurnOpener
from rollout.gateway.record.turn_record import TurnRecord, begin_request
from services.chassis import metrics
from services.chassis.errors import Reason, deadline_exceeded, failed_precondition
from services.chassis.log import get_logger
from services.chassis.rpc.status import from_dependency

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

__all__ = ["Send", "Turn", "TurnServices"]

Send = Callable[[pb.GenerateResponse], None]
"""Takes an event for the agent; the event must not be used again."""

_log = get_logger()

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
    clock: Callable[[], float]
    """Seconds of the event loop; deadlines are on it."""


class Turn:
    """One call of Generate."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        prompt: Prompt,
        attempt_id: str,
        services: TurnServices,
        deadline: float | None,
    ) -> None:
        """`deadline` is the agent's, in seconds of `services.clock`; None: none."""
        self._request = request
        self._prompt = prompt
        self._attempt_id = attempt_id
        self._services = services
        self._deadline = deadline
        self._num_streams = 0  # opened so far
        self._pinned_version: int | None = None
        self._required_weight_version = 0
        self._record: TurnRecord

    async def run(self, send: Send) -> None:
        """Send the recorded tokens that the agent lacks, then new ones, then the turn's end."""
        self._forward(await self._begin(), send)
        while not self._record.has_ended:
            async with aclosing(self._stream()) as responses:
                async for response in responses:
                    await self._record.append(response.tokens, response.finish_reason)
                    self._forward(response.tokens, send)
        await self._record.close()
        send(self._end_event())

    async def _begin(self) -> tokens_pb2.Tokens:
        """Open the turn in the store; returns recorded tokens from `resume_from_offset` on."""
        # The prediction runs while the store opens the turn.
        self._services.servers.lengths.prefetch(self._length_query(self._prompt.ids or ()))
        begin = begin_request(self._request, self._prompt, self._attempt_id)
        begun = await self._services.opener.begin(begin)
        if begun.HasField("pinned_weight_version"):
            self._pinned_version = begun.pinned_weight_version
        self._required_weight_version = begun.required_weight_version
        self._record = TurnRecord(
            self._request, self._prompt, begun, self._services.store, self._services.recorder
        )
        self._report_drift()
        self._services.servers.lengths.prefetch(self._length_query(self._record.prompt_ids))
        await self._check_nothing_lost()
        start = token_messages.num_environment(begun.tokens) + self._request.resume_from_offset
        return token_messages.after(begun.tokens, start)

    async def _check_nothing_lost(self) -> None:
        """Fail the rollout if the store has fewer tokens than the agent has received."""
        received, recorded = self._request.resume_from_offset, len(self._record.sampled_ids)
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
                self._turn_request(), self._pinned_version, self._server_request
            ) as stream:
                async for response in stream.responses:
                    yield response
            if not record.has_ended and self._num_sampled == num_before:
                servers.suspect(stream.server)
        except grpc.aio.AioRpcError as error:
            await self._handle_failure(stream.server, error)
        except (asyncio.CancelledError, grpc.aio.UsageError):
            _raise_if_cancelled()  # else the server left the run and its channel is closed
        if record.has_ended:
            servers.lengths.observe(self._length_query(record.prompt_ids), self._num_sampled)
        else:
            _CONTINUED.inc()

    async def _handle_failure(self, server: Server, error: grpc.aio.AioRpcError) -> None:
        """Raise what another server would answer too; else suspect this one and back off."""
        failure = decode(error)
        if isinstance(failure, InvalidRequestError):
            raise from_dependency(failure)
        if isinstance(failure, DeadlineError) and self._deadline is not None:
            raise deadline_exceeded("the agent's deadline passed during its turn")
        self._services.servers.suspect(server)
        await Backoff().wait(failure.retry_after)

    def _forward(self, tokens: tokens_pb2.Tokens, send: Send) -> None:
        """Send recorded tokens, the last ones of the turn so far."""
        if tokens.token_ids:
            event = pb.GenerateResponse()
            event.chunk.offset = self._num_sampled - len(tokens.token_ids)
            event.chunk.tokens.CopyFrom(tokens)
            send(event)
            _FORWARDED.inc(len(tokens.token_ids))

    @property
    def _num_sampled(self) -> int:
        return len(self._record.sampled_ids)

    def _turn_request(self) -> TurnRequest:
        query = self._length_query(self._record.prompt_ids)
        max_new_tokens = self._request.sampling.max_new_tokens - self._num_sampled
        predicted = self._services.servers.lengths.predict(query)
        return TurnRequest(
            group=query.group,
            rollout=self._request.rollout_id,
            num_tokens=len(self._record.prompt_ids) + self._num_sampled,
            max_new_tokens=max_new_tokens,
            expected_tokens=remaining_tokens(predicted, self._num_sampled, max_new_tokens),
            continues=bool(self._num_sampled or self._num_streams),
            required_weight_version=self._required_weight_version,
        )

    def _server_request(self) -> tuple[server_pb.GenerateTokensRequest, float | None]:
        sampling = tokens_pb2.SamplingParams()
        sampling.CopyFrom(self._request.sampling)
        sampling.max_new_tokens -= self._num_sampled
        self._num_streams += 1
        request = server_pb.GenerateTokensRequest(
            run_id=self._request.run_id,
            request_id=f"{self._request.turn_id}/{self._attempt_id}/{self._num_streams}",
            token_ids=[*self._record.prompt_ids, *self._record.sampled_ids],
            sampling=sampling,
            chunk_interval=self._request.chunk_interval,
        )
        if self._deadline is None:
            return request, None
        return request, max(self._deadline - self._services.clock(), 0.0)

    def _length_query(self, prompt_ids: Sequence[int]) -> LengthQuery:
        return LengthQuery(
            group=_group_id(self._request.rollout_id),
            token_ids=prompt_ids,
            turn_index=self._prompt.num_answers,
        )

    def _report_drift(self) -> None:
        drift = self._record.drift
        if drift is None or self._record.is_closed:  # reported when the turn ran
            return
        _DRIFTED.inc()
        names = {name: getattr(self._request, name) for name in ("run_id", "rollout_id", "turn_id")}
        _log.warning("retokenization_drift", **names, position=drift.position)

    def _end_event(self) -> pb.GenerateResponse:
        end = pb.TurnEnd(
            finish_reason=self._record.finish_reason,
            text=self._record.text(),
            num_prompt_tokens=len(self._record.prompt_ids),
            num_sampled_tokens=self._num_sampled,
        )
        if (drift := self._record.drift) is not None:
            end.drift.position = drift.position
            end.drift.recorded_text = drift.recorded_text
            end.drift.retokenized_text = drift.retokenized_text
        return pb.GenerateResponse(end=end)


def _group_id(rollout_id: str) -> str:
    """The task of a leased rollout, named task/slot/attempt; else the rollout itself."""
    task_id, _, _ = rollout_id.rpartition("/")[0].rpartition("/")
    return task_id or rollout_id


def _raise_if_cancelled() -> None:
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
