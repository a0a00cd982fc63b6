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
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
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
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from rollout.gateway.dispatch.impossible_output import fault_of
from rollout.gateway.record.packed_tokens import num_tokens
from services.chassis import metrics
from services.chassis.errors import Reason, deadline_exceeded, failed_precondition
from services.chassis.rpc.status import from_dependency

if TYPE_CHECKING:
    from rollout.gateway.dispatch.outlier_ejection import OutlierEjection
    from rollout.gateway.dispatch.policies import TurnRequest
    from rollout.gateway.dispatch.server_pool import ServerPool
    from rollout.gateway.dispatch.server_state import Server

Response = pb.GenerateTokensResponse

_REPEATED = 3
"""Verdicts of one server that count where no other serves."""
_EMPTY_TOKENS = 1
"""An answer of at most this many tokens is empty: it has its end token alone."""
_CONTINUED = metrics.counter(
    "rollout_gateway", "turns_continued_total", "Streams continued from a recorded prefix."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTerms:
    """What a turn asks of its next stream, and what the answer may be."""

    turn: TurnRequest
    """What the server is chosen by; its numbers are those at the start of the stream."""
    request: Callable[[], tuple[pb.GenerateTokensRequest, float | None]]
    """Builds the request once a server is known, and the seconds for it; None: no deadline."""
    num_sampled: int
    """Tokens that earlier streams of the turn have sampled."""
    pinned_version: int | None
    """The only weight version that may sample; None if any allowed one may."""
    vocabulary_size: int
    """Token ids are less than this."""
    has_deadline: bool
    """Whether the agent has set one."""


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

    def __init__(self, terms: StreamTerms, servers: ServerPool, failures: TurnFailures) -> None:
        self._terms = terms
        self._servers = servers
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
        waiting, terms = self._servers.waiting, self._terms
        server = await waiting.acquire(terms.turn, terms.pinned_version)
        try:
            request, timeout = terms.request()
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
        most = self._terms.turn.max_new_tokens - self._num_received
        if fault := fault_of(response.tokens, self._terms.vocabulary_size, most):
            self._handle_fault(server, fault)
            return True
        return self._has_doubtful_end(server, response)

    def _is_of_another_version(self, response: Response) -> bool:
        """Whether tokens are of another version than the rollout is pinned to."""
        pinned = self._terms.pinned_version
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
        number = self._num_sampled + num_tokens(response.tokens)
        is_believed = server.address in self._failures.avoided or not outliers.doubts_empty(server)
        if not is_empty_answer(response.finish_reason, number) or is_believed:
            return False
        outliers.answered(server, is_empty=True)
        self._failures.add(server, "an empty answer, as all others before")
        return True

    async def _handle_failure(self, server: Server, error: grpc.aio.AioRpcError) -> None:
        """Raise what another server would answer too; else go on there after a while."""
        failure = decode(error)
        if isinstance(failure, DeadlineError) and self._terms.has_deadline:
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
        return self._servers.agree_too_long(
            server, self._terms.turn.num_tokens + self._num_received
        )

    @property
    def _num_sampled(self) -> int:
        """Tokens of the turn's answer so far."""
        return self._terms.num_sampled + self._num_received


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
