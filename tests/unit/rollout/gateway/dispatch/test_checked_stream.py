"""What a turn gets of a stream, and what is held against its server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from rollout.gateway.dispatch.checked_stream import CheckedStream, TurnFailures
from rollout.gateway.dispatch.outlier_ejection import OutlierEjection
from rollout.gateway.dispatch.policies import TurnRequest
from rollout.gateway.dispatch.server_state import Server
from services.chassis.errors import Reason, ServiceError
from tests.lib.rollout.gateway.support import sampled

VOCABULARY = 50
Part = pb.GenerateTokensResponse | grpc.aio.AioRpcError


class Stub:
    """Answers the one call of a server."""

    def __init__(self, parts: Sequence[Part | grpc.aio.UsageError]) -> None:
        self._parts = parts

    def GenerateTokens(self, *_: object, **__: object) -> Stub:
        """The call."""
        return self

    def cancel(self) -> None:
        """End it."""

    async def __aiter__(self) -> AsyncIterator[pb.GenerateTokensResponse]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part


class Pool:
    """A server for each stream, in order, with what it sends."""

    def __init__(self, *streams: Sequence[Part | grpc.aio.UsageError]) -> None:
        nothing: Any = None
        self.all = [
            Server(f"s{i}", nothing, cast("Any", Stub(parts))) for i, parts in enumerate(streams)
        ]
        self.outliers = OutlierEjection(lambda: self.all)
        self.failures = TurnFailures(self.outliers)
        self.suspected: list[str] = []
        self.waiting = self
        self.released: list[str] = []
        self._left = iter(self.all)

    async def acquire(self, *_: object) -> Server:
        """The next one."""
        return next(self._left)

    def release(self, server: Server) -> None:
        """Note it."""
        self.released.append(server.address)

    def suspect(self, server: Server) -> bool:
        """Note it."""
        self.suspected.append(server.address)
        return True

    async def received(self, pinned_version: int | None = None) -> list[tuple[str, int]]:
        """Server and number of tokens of each response of the next stream."""
        turn = TurnRequest(
            group="g",
            rollout="r",
            num_tokens=9,
            max_new_tokens=4,
            expected_tokens=4.0,
            pinned_weight_version=pinned_version,
        )
        stream = CheckedStream(
            turn,
            lambda: (pb.GenerateTokensRequest(), None),
            cast("Any", self),
            self.failures,
            VOCABULARY,
        )
        return [
            (server.address, len(response.tokens.token_ids) // 4)
            async for server, response in stream.responses()
        ]


def response(*ids: int, version: int = 1) -> pb.GenerateTokensResponse:
    """Sampled tokens."""
    tokens = sampled(ids)
    for span in tokens.spans:
        span.weight_version = version
    return pb.GenerateTokensResponse(tokens=tokens)


def failure(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    """Of a call."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, "broken")


async def test_each_response_comes_with_its_server() -> None:
    """In order; a server that sampled is not suspected when it ends early."""
    pool = Pool([response(1, 2), response(3)])
    assert await pool.received() == [("s0", 2), ("s0", 1)]
    assert pool.suspected == []


async def test_a_server_that_left_the_run_is_let_go() -> None:
    """Its channel is closed already when the turn wants to go there: another server goes on."""
    pool = Pool([grpc.aio.UsageError("Channel is closed.")])
    assert await pool.received() == []
    assert (pool.released, pool.suspected) == (["s0"], [])


async def test_a_stream_without_a_token_makes_its_server_suspect() -> None:
    """No other turn goes there until it reports again."""
    pool = Pool([])
    assert await pool.received() == []
    assert pool.suspected == ["s0"]


@pytest.mark.parametrize(("pinned", "expected"), [(None, 2), (1, 1)])
async def test_tokens_of_another_version_end_the_stream(pinned: int | None, expected: int) -> None:
    """Of a pinned rollout; any other takes them."""
    pool = Pool([response(1, version=1), response(2, version=2)])
    assert len(await pool.received(pinned)) == expected
    assert pool.suspected == ["s0"] * (pinned is not None)


@pytest.mark.parametrize(
    "impossible", [response(VOCABULARY), response(1, 2, 3, 4, 5)], ids=["id", "number"]
)
async def test_impossible_output_is_not_passed_on(impossible: pb.GenerateTokensResponse) -> None:
    """The next server is asked; if that one answers so too, the turn fails."""
    pool = Pool([impossible], [impossible])
    assert await pool.received() == []
    with pytest.raises(ServiceError, match="impossible answers") as caught:
        await pool.received()
    assert caught.value.reason is Reason.ENGINE_FAILED


async def test_all_responses_of_a_stream_count_to_what_was_asked_for() -> None:
    """4 tokens were: the second response brings one too many."""
    pool = Pool([response(1), response(2, 3, 4, 5)])
    assert await pool.received() == [("s0", 1)]
    assert pool.failures.avoided == {"s0"}


async def test_an_empty_answer_is_believed_once_another_server_gives_it() -> None:
    """Of servers that have given no other answer."""
    end = response(7)
    end.finish_reason = tokens_pb2.FINISH_REASON_STOP
    pool = Pool([end], [end])
    for server in pool.all:
        server.info = pb.GetServerInfoResponse()
    assert await pool.received() == []
    assert pool.failures.avoided == {"s0"}
    pool.outliers.answered(pool.all[1], is_empty=True)
    assert await pool.received() == [("s1", 1)]


async def test_a_broken_server_is_avoided_and_what_it_sent_stays() -> None:
    """Another one goes on from there."""
    pool = Pool([response(1), failure(grpc.StatusCode.INTERNAL)])
    assert await pool.received() == [("s0", 1)]
    assert pool.suspected == ["s0"]
    assert pool.failures.avoided == {"s0"}
