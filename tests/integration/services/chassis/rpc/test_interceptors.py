"""What happens around every call: errors, malformed bytes, deadlines, tokens, traces."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import REGISTRY
from seamflow.channel import connect
from seamflow.common.v1 import error_pb2
from seamflow.credentials import Credentials
from seamflow.rollout.v1 import rollout_service_pb2, rollout_service_pb2_grpc
from seamflow.stubs import async_stub

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import Reason
from services.chassis.rpc import interceptors, server
from services.chassis.rpc.interceptors import CallInterceptor
from services.chassis.rpc.server import Service, started
from tests.lib.chassis.support import CANARY, DemoServicer, demo_service

START = "/seamflow.rollout.v1.RolloutService/StartRollout"
GENERATE = "/seamflow.rollout.v1.RolloutService/Generate"
BOTH = pytest.mark.parametrize("method", [START, GENERATE])


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a demo in this process."""
    async with (
        started(demo_service(), ServerConfig()) as port,
        connect(f"127.0.0.1:{port}") as channel,
    ):
        yield channel


async def _send(channel: grpc.aio.Channel, method: str, data: bytes, **options: Any) -> None:
    """Call `method` with raw bytes and read the whole answer."""
    if method == START:
        unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        await unary(data, **options)
        return
    stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
    async for _ in stream(data, **options):
        pass


async def _refusal(
    channel: grpc.aio.Channel, method: str, rollout_id: str, **options: Any
) -> grpc.aio.AioRpcError:
    request: Any = rollout_service_pb2.StartRolloutRequest(rollout_id=rollout_id)
    if method == GENERATE:
        request = rollout_service_pb2.GenerateRequest(rollout_id=rollout_id)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _send(channel, method, request.SerializeToString(), **options)
    return refused.value


def _details(error: grpc.aio.AioRpcError) -> dict[str, bytes]:
    """The packed details by their type's short name, as any gRPC tool reads them."""
    trailing = dict(error.trailing_metadata() or ())
    status = error_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    assert status.message == error.details()
    return {detail.type_url.rpartition("google.rpc.")[2]: detail.value for detail in status.details}


@BOTH
async def test_a_service_error_becomes_code_reason_and_retry_time(
    channel: grpc.aio.Channel, method: str
) -> None:
    """Back-pressure reaches the caller as RESOURCE_EXHAUSTED with ErrorInfo and RetryInfo."""
    error = await _refusal(channel, method, "refuse")
    details = _details(error)
    info = error_pb2.ErrorInfo.FromString(details["ErrorInfo"])
    delay = error_pb2.RetryInfo.FromString(details["RetryInfo"]).retry_delay
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (info.reason, info.domain) == (Reason.TOO_MANY_REQUESTS, "seamflow")
    assert (delay.seconds, delay.nanos) == (2, 500_000_000)


@BOTH
async def test_a_wrong_field_is_named(channel: grpc.aio.Channel, method: str) -> None:
    """INVALID_ARGUMENT carries a BadRequest with the field and the cure."""
    error = await _refusal(channel, method, "wrong")
    bad = error_pb2.BadRequest.FromString(_details(error)["BadRequest"])
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bad.field_violations[0].field == "rollout_id"
    assert "give another" in bad.field_violations[0].description


@BOTH
async def test_an_unknown_exception_shows_a_request_id_only(
    channel: grpc.aio.Channel, method: str
) -> None:
    """INTERNAL names the request id, never the text of the exception."""
    error = await _refusal(channel, method, "crash", metadata=(("x-request-id", "mine-1"),))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "mine-1" in str(error.details())
    assert CANARY not in repr(error)


@BOTH
async def test_an_error_carries_the_callers_trace(channel: grpc.aio.Channel, method: str) -> None:
    """The W3C trace of the caller is continued; a malformed one is replaced, not echoed."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    parent = (("traceparent", f"00-{trace}-b7ad6b7169203331-01"),)
    error = await _refusal(channel, method, "wrong", metadata=parent)
    info = error_pb2.ErrorInfo.FromString(_details(error)["ErrorInfo"])
    assert info.metadata["trace_id"] == trace
    error = await _refusal(channel, method, "wrong", metadata=(("traceparent", "00-evil"),))
    info = error_pb2.ErrorInfo.FromString(_details(error)["ErrorInfo"])
    assert len(info.metadata["trace_id"]) == 32


def _mutations(method: str, count: int) -> list[bytes]:
    """Valid requests with bytes flipped, cut, inserted and appended."""
    request: Any = rollout_service_pb2.StartRolloutRequest(
        run_id="run",
        rollout_id="rollout",
        labels={"kind": "test"},
    )
    if method == GENERATE:
        request = rollout_service_pb2.GenerateRequest(
            run_id="run",
            rollout_id="rollout",
            token_ids=rollout_service_pb2.TokenIds(token_ids=range(50)),
        )
    valid, source = request.SerializeToString(), random.Random(15)
    return [_mutated(valid, source) for _ in range(count)]


def _mutated(valid: bytes, source: random.Random) -> bytes:
    data = bytearray(valid)
    for _ in range(source.randint(1, 4)):
        place = source.randrange(len(data))
        kind = source.randrange(3)
        if kind == 0:
            data[place] ^= 1 << source.randrange(8)
        elif kind == 1:
            data = data[: place + 1]
        else:
            data[place:place] = source.randbytes(source.randint(1, 8))
    return bytes(data)


async def _codes(method: str) -> Counter[grpc.StatusCode]:
    codes: Counter[grpc.StatusCode] = Counter()
    async with (
        started(demo_service(), ServerConfig()) as port,
        connect(f"127.0.0.1:{port}") as channel,
    ):
        for data in _mutations(method, 1000):
            try:
                await _send(channel, method, data)
                codes[grpc.StatusCode.OK] += 1
            except grpc.aio.AioRpcError as error:
                codes[error.code()] += 1
    return codes


@BOTH
async def test_malformed_bytes_are_the_callers_mistake(method: str) -> None:
    """Each of 1,000 mutated requests is parsed or fails with INVALID_ARGUMENT, nothing else."""
    codes = await _codes(method)
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    assert min(codes.values()) > 50


@BOTH
async def test_without_the_interceptor_malformed_bytes_look_like_our_bug(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Negative control: plain gRPC answers UNKNOWN."""
    caplog.set_level("CRITICAL", "grpc._cython.cygrpc")
    monkeypatch.setattr(interceptors, "_deserializer", lambda deserialize: deserialize)
    codes = await _codes(method)
    assert codes[grpc.StatusCode.UNKNOWN] > 50


@BOTH
async def test_no_call_outlasts_the_cap(
    monkeypatch: pytest.MonkeyPatch, method: str, tmp_path: Any
) -> None:
    """A caller without a deadline is cut off by the server's own."""
    capped = CallInterceptor("test", unary_seconds=0.05, stream_seconds=0.05)
    monkeypatch.setattr(server, "CallInterceptor", lambda *_: capped)
    async with (
        started(_Forever.service(), ServerConfig(drain_seconds=0)) as port,
        connect(f"127.0.0.1:{port}") as channel,
    ):
        error = await _refusal(channel, method, "")
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "calls to this server may take at most 0.05 s" in str(error.details())


async def test_a_call_the_caller_gave_up_is_counted_as_late() -> None:
    """Metrics distinguish an exceeded deadline from a cancelled call."""
    servicer = _Forever()
    add = rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server
    config = ServerConfig(drain_seconds=0)
    async with (
        started(Service([(add, servicer)]), config, "late") as port,
        connect(f"127.0.0.1:{port}") as channel,
    ):
        error = await _refusal(channel, START, "", timeout=0.1)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    labels = {"method": START, "code": "DEADLINE_EXCEEDED"}
    assert REGISTRY.get_sample_value("seamflow_late_rpc_requests_total", labels) == 1


class _Forever(DemoServicer):
    """Never answers."""

    @classmethod
    def service(cls) -> Service:
        return Service([(rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server, cls())])

    async def StartRollout(self, request: Any, context: Any) -> Any:
        """Unary."""
        await asyncio.Event().wait()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Streamed."""
        await self.StartRollout(request, context)
        yield


@BOTH
async def test_a_token_is_required_of_every_call_but_health(method: str) -> None:
    """No token and a wrong one are UNAUTHENTICATED, the right one passes, probes need none.

    Generate takes a rollout's credential in place of the token, which only the gateway can check.
    """
    async with started(demo_service(), ServerConfig(token="s3cret")) as port:
        for token in (None, "wrong", "s3cret ") if method == START else (None,):
            async with connect(f"127.0.0.1:{port}", Credentials(token=token)) as channel:
                error = await _refusal(channel, method, "a")
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
                check = channel.unary_unary("/grpc.health.v1.Health/Check")
                await check(b"")
        async with connect(f"127.0.0.1:{port}", Credentials(token="s3cret")) as channel:
            await _send(channel, method, b"")


async def test_a_response_of_the_wrong_type_is_internal() -> None:
    """Our own mistake shows no exception text either."""

    class Wrong(DemoServicer):
        async def StartRollout(self, request: Any, context: Any) -> Any:
            return object()

    add = rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server
    async with (
        started(Service([(add, Wrong())]), ServerConfig()) as port,
        connect(f"127.0.0.1:{port}") as channel,
    ):
        error = await _refusal(channel, START, "a")
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "object" not in str(error.details())


async def test_a_peers_refusal_is_passed_on_without_addresses() -> None:
    """A call that failed because a service behind is away is UNAVAILABLE and names no address."""

    class Relay(DemoServicer):
        async def StartRollout(self, request: Any, context: Any) -> Any:
            async with connect("127.0.0.1:1") as unreachable:
                stub = async_stub(rollout_service_pb2_grpc.RolloutServiceStub, unreachable)
                return await stub.StartRollout(request, timeout=5)

    add = rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server
    async with (
        started(Service([(add, Relay())]), ServerConfig()) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        error = await _refusal(channel, START, "a")
    info = error_pb2.ErrorInfo.FromString(_details(error)["ErrorInfo"])
    assert (error.code(), info.reason) == (
        grpc.StatusCode.UNAVAILABLE,
        Reason.DEPENDENCY_UNAVAILABLE,
    )
    assert "127.0.0.1" not in str(error.details())
