"""The stream of one rollout server, and the verdicts on what it answers to a turn.

| verdict on a response or its stream | what follows |
|---|---|
| of another weight version than the pinned one | the server is suspect, another one goes on |
| impossible output | another one goes on; several servers agree: the turn fails |
| empty answer of a server that gives no other | another one is asked, once for each server |
| the call failed | by whose fault it is: another one goes on, or the turn fails |
| the prompt is too long | another one agrees: the turn fails |
| it ended without a token | the server is suspect, another one goes on |

A response with a bad verdict is never passed on, so it is never recorded.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from math import isfinite
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
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from rollout.gateway.record import packed_tokens
from rollout.gateway.record.packed_tokens import num_tokens
from services.chassis import metrics
from services.chassis.errors import Reason, deadline_exceeded, failed_precondition
from services.chassis.rpc.status import from_dependency
from services.lib.token_bytes import unpack_ids, unpack_logprobs

if TYPE_CHECKING:
    from rollout.gateway.dispatch.outlier_ejection import OutlierEjection
    from rollout.gateway.dispatch.policies import TurnRequest
    from rollout.gateway.dispatch.server_pool import ServerPool
    from rollout.gateway.dispatch.server_state import Server
    from rollout.gateway.record.turn_record import TurnRecord

_MOST_LOGPROB = 1e-3
"""Log-probs are at most 0, but for rounding."""
_LEAST_LOGPROB = -3e38
_SERVER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:@+=/-]{0,199}")
_SOURCES = frozenset(tokens_pb2.VersionSource.values())


def fault_of(tokens: tokens_pb2.PackedTokens, vocabulary_size: int, most: int) -> str:
    """What is impossible about tokens of which at most `most` were asked for; else empty."""
    number = packed_tokens.num_tokens(tokens)
    if len(tokens.token_ids) % 4 or len(tokens.logprobs) != len(tokens.token_ids):
        return f"{len(tokens.token_ids)} bytes of ids with {len(tokens.logprobs)} of log-probs"
    if number > most:
        return f"{number} tokens where at most {most} were asked for"
    return (
        _fault_of_ids(tokens.token_ids, vocabulary_size)
        or _fault_of_logprobs(tokens.logprobs)
        or _fault_of_spans(tokens, number)
    )


def _fault_of_ids(packed: bytes, vocabulary_size: int) -> str:
    ids = unpack_ids(packed)
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < vocabulary_size:
            return f"token id {token_id} where the model's are 0 … {vocabulary_size - 1}"
    return ""


def _fault_of_logprobs(packed: bytes) -> str:
    logprobs = unpack_logprobs(packed)
    # NaN and infinity propagate to the sum.
    extremes = min(logprobs, default=0.0), max(logprobs, default=0.0), sum(logprobs)
    if extremes[0] >= _LEAST_LOGPROB and extremes[1] <= _MOST_LOGPROB and isfinite(extremes[2]):
        return ""
    bad = next(each for each in logprobs if not _LEAST_LOGPROB <= each <= _MOST_LOGPROB)
    return f"log-prob {bad:g}, which must be finite and at most 0"


def _fault_of_spans(tokens: tokens_pb2.PackedTokens, number: int) -> str:
    end = 0
    for span in tokens.spans:
        if span.start != end or span.num_tokens < 1 or not _is_known(span):
            return f"a false span [{span.start}, {span.start + span.num_tokens})"
        end += span.num_tokens
    return "" if end == number else f"spans of {end} tokens for {number}"


def _is_known(span: tokens_pb2.Span) -> bool:
    return (
        span.origin == tokens_pb2.ORIGIN_POLICY
        and span.weight_version >= 0
        and span.version_source in _SOURCES
        and (not span.server_id or _SERVER_ID.fullmatch(span.server_id) is not None)
    )


Response = pb.GenerateTokensResponse
Request = Callable[[], tuple[pb.GenerateTokensRequest, float | None]]
"""Builds the request once a server is known, and the seconds for it; None: no deadline."""

_REPEATED = 3
"""Verdicts of one server that count where no other serves."""
_EMPTY_TOKENS = 1
"""An answer of at most this many tokens is empty: it has its end token alone."""
_CONTINUED = metrics.counter(
    "rollout_gateway", "turns_continued_total", "Streams continued from a recorded prefix."
)


class TurnFailures:
    """What servers have said against one turn, to tell whether they are to blame or the turn is.

    A turn that another server answers was not to blame: those that failed it are.

    So no agent can have servers ejected by turns that no server can answer.
    """

    def __init__(self, outliers: OutlierEjection) -> None:
        self._outliers = outliers
        self._accusers: list[tuple[Server, str]] = []
        self._verdicts: Counter[str] = Counter()
        self.avoided: frozenset[str] = frozenset()
        """Addresses of the servers that have failed it."""

    def add(self, server: Server, cause: str) -> None:
        """It failed there, maybe by no fault of its own."""
        self._accusers.append((server, cause))
        self.avoided |= {server.address}

    def add_verdict(self, server: Server, cause: str) -> bool:
        """It was refused there, or answered impossibly; True: several servers agree.

        Or the same one has said so three times, which it gets only if no other serves. Without
        ejection the word of one server is final.
        """
        self.add(server, cause)
        self._verdicts[server.address] += 1
        most = _REPEATED if self._outliers.enabled else 1
        return len(self._verdicts) > 1 or self._verdicts[server.address] >= most

    def answered(self) -> None:
        """It was answered: what was said before counts against who said it."""
        for server, cause in self._accusers:
            self._outliers.failed(server, cause)
        self._accusers.clear()
        self._verdicts.clear()


class CheckedStream:
    """One stream of a turn; `failures` outlive it, as they count over all streams of the turn."""

    def __init__(
        self,
        turn: TurnRequest,
        request: Request,
        servers: ServerPool,
        failures: TurnFailures,
        vocabulary_size: int,
    ) -> None:
        """`turn` is as it is at the start of the stream; ids are less than `vocabulary_size`."""
        self._turn = turn
        self._request = request
        self._servers = servers
        self._vocabulary_size = vocabulary_size
        self._has_deadline = False
        self._failures = failures
        self._num_received = 0  # tokens that were passed on

    async def responses(self) -> AsyncGenerator[tuple[Server, Response]]:
        """Each response that may be recorded, with its server; leave it when the turn has ended.

        Where it ends by itself another server has to go on.

        Raises:
            ServiceError: the turn must not be retried on another server.
        """
        try:
            async with self._call() as (server, responses):
                async for response in responses:
                    if self._is_refused(server, response):
                        return
                    if response.tokens.token_ids:
                        self._failures.answered()
                    self._num_received += num_tokens(response.tokens)
                    yield server, response
            if not self._num_received:
                self._servers.suspect(server)
        except grpc.aio.AioRpcError as error:
            await self._handle_failure(server, error)
        except (asyncio.CancelledError, grpc.aio.UsageError):
            _raise_if_cancelled()  # else the server left the run and its channel is closed
        _CONTINUED.inc()

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[tuple[Server, AsyncIterator[Response]]]:
        """Wait for a server and call it; on exit the server's work ends and its slot is free."""
        waiting = self._servers.waiting
        server = await waiting.acquire(self._turn)
        try:
            request, timeout = self._request()
            self._has_deadline = timeout is not None
            call = server.stub.GenerateTokens(request, timeout=timeout)
            try:
                yield server, aiter(call)
            finally:
                call.cancel()
        finally:
            waiting.release(server)

    def _is_refused(self, server: Server, response: Response) -> bool:
        """Whether a response must not be recorded; noted against its server.

        Raises:
            ServiceError: several servers answer impossibly.
        """
        if self._is_of_another_version(response):
            self._servers.suspect(server)  # it swapped since its last report
            return True
        most = self._turn.max_new_tokens - self._num_received
        if fault := fault_of(response.tokens, self._vocabulary_size, most):
            self._handle_fault(server, fault)
            return True
        return self._has_doubtful_end(server, response)

    def _is_of_another_version(self, response: Response) -> bool:
        """Whether tokens are of another version than the rollout is pinned to."""
        pinned = self._turn.pinned_weight_version
        return pinned is not None and any(
            span.origin == tokens_pb2.ORIGIN_POLICY and span.weight_version != pinned
            for span in response.tokens.spans
        )

    def _handle_fault(self, server: Server, fault: str) -> None:
        """Raise if several servers answer impossibly; else another one goes on."""
        if self._failures.add_verdict(server, fault):
            message = f"rollout servers give impossible answers: {fault}"
            raise failed_precondition(Reason.ENGINE_FAILED, message)

    def _has_doubtful_end(self, server: Server, response: Response) -> bool:
        """Whether the answer is empty, of a server that has given no other; noted against it.

        Each server is doubted once: the second time its word counts.
        """
        outliers = self._servers.outliers
        number = self._turn.num_sampled + self._num_received + num_tokens(response.tokens)
        is_believed = server.address in self._failures.avoided or not outliers.doubts_empty(server)
        if not is_empty_answer(response.finish_reason, number) or is_believed:
            return False
        outliers.answered(server, is_empty=True)
        self._failures.add(server, "an empty answer, as all others before")
        return True

    async def _handle_failure(self, server: Server, error: grpc.aio.AioRpcError) -> None:
        """Raise what another server would answer too; else go on there after a while."""
        failure = decode(error)
        if isinstance(failure, DeadlineError) and self._has_deadline:
            raise deadline_exceeded("the agent's deadline passed during its turn")
        if isinstance(failure, InvalidRequestError):
            if self._is_too_long(server, failure) or self._failures.add_verdict(
                server, str(failure)
            ):
                raise from_dependency(failure)
        elif self._servers.suspect(server) and _is_of_server(failure):
            self._failures.add(server, str(failure))
        await Backoff().wait(failure.retry_after)

    def _is_too_long(self, server: Server, failure: InvalidRequestError) -> bool:
        """Whether other servers report too that the prompt does not fit."""
        if failure.reason != Reason.CONTEXT_LENGTH_EXCEEDED:
            return False
        return self._servers.agree_too_long(server, self._turn.num_tokens + self._num_received)


def is_empty_answer(finish_reason: tokens_pb2.FinishReason.ValueType, num_sampled: int) -> bool:
    """Whether an answer of `num_sampled` tokens has ended with no token but its end token."""
    return finish_reason == tokens_pb2.FINISH_REASON_STOP and num_sampled <= _EMPTY_TOKENS


def _is_of_server(failure: SeamflowError) -> bool:
    """Whether a failure tells of a broken server, not of one that ends, restarts or is full."""
    if isinstance(failure, UnavailableError):
        return failure.reason not in (Reason.DRAINING, Reason.WEIGHTS_NOT_LOADED)
    return not isinstance(failure, ExhaustedError)


def _raise_if_cancelled() -> None:
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


_FEATURE = "routed_experts"
"""Of a server that records them.

An engine may report experts only when a request ends, as SGLang does. A turn that a stop string or
the end of a forced answer cuts is aborted before: one more token is requested
after it and dropped, and with it the engine reports what it chooses for the turn's tokens."""
_EXPERTS_SECONDS = 60.0


async def add_experts(
    response: pb.GenerateTokensResponse, server: Server, record: TurnRecord
) -> None:
    """Request the routed experts up to the tokens of a response that was cut, in place.

    Args:
        response: what the turn keeps of it.
        server: it has sent the response.
        record: of the turn, before the response.
    """
    if response.HasField("routed_experts") or _FEATURE not in server.features:
        return
    begin = record.begin
    request = pb.GenerateTokensRequest(
        run_id=begin.run_id,
        attempt_id=f"{begin.turn_id}/{begin.attempt_id}/experts",
        token_ids=record.packed_ids + response.tokens.token_ids,
        sampling=tokens_pb2.SamplingParams(max_new_tokens=1),
        routed_experts_from=record.routed_from,
    )
    call = server.stub.GenerateTokens(request, timeout=_EXPERTS_SECONDS)
    try:
        with suppress(grpc.aio.AioRpcError):
            async for answer in call:
                if answer.HasField("routed_experts"):
                    response.routed_experts.CopyFrom(answer.routed_experts)
                    return
    finally:
        call.cancel()
