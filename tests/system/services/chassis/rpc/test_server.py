"""Lifecycle of a served process: start, health, admin pages, drain, frozen clients."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from seamflow.channel import connect
from seamflow.network.keepalive import KEEPALIVE
from seamflow.rollout.v1 import rollout_service_pb2, rollout_service_pb2_grpc
from seamflow.stubs import async_stub

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ExitCode
from services.chassis.rpc.listen import server_options
from services.chassis.rpc.server import Service, started
from tests.lib.chassis.support import (
    CANARY,
    DemoProcess,
    demo,
    demo_popen,
    demo_process,
    demo_service,
    fast_keepalive,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoProcess]:
    """One demo for the tests that leave it as it was."""
    with demo_process(tmp_path_factory.mktemp("demo"), "--development") as process:
        yield process


async def _wait_for_exit(demo: DemoProcess) -> int:
    return await asyncio.to_thread(demo.process.wait)


async def test_health_speaks_for_the_process_and_each_service(shared: DemoProcess) -> None:
    """ "" and every served name are SERVING; an unknown name is NOT_FOUND."""
    async with connect(shared.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "seamflow.rollout.v1.RolloutService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_thousands_of_calls_at_once_are_all_answered(shared: DemoProcess) -> None:
    """A runner of many agents begins like this; gRPC itself would cancel some of them."""
    async with connect(shared.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        calls = [health.Check(health_pb2.HealthCheckRequest()) for _ in range(4000)]
        assert {answer.status for answer in await asyncio.gather(*calls)} == {SERVING}


async def test_admin_pages(shared: DemoProcess) -> None:
    """The admin port reports liveness, readiness, version and the rate and duration of calls."""
    async with connect(shared.target) as channel:
        stub = async_stub(rollout_service_pb2_grpc.RolloutServiceStub, channel)
        await stub.StartRollout(rollout_service_pb2.StartRolloutRequest(rollout_id="a"))
    assert shared.page("/healthz") == (200, "ok\n")
    assert shared.page("/readyz") == (200, "ready\n")
    assert json.loads(shared.page("/version")[1])["service"] == "demo"
    metrics = shared.page("/metrics")[1]
    method = "/seamflow.rollout.v1.RolloutService/StartRollout"
    assert f'seamflow_demo_rpc_requests_total{{code="OK",method="{method}"}} 1.0' in metrics
    assert f'seamflow_demo_rpc_seconds_count{{method="{method}"}} 1.0' in metrics
    assert f'seamflow_demo_rpc_in_flight{{method="{method}"}} 0.0' in metrics
    assert shared.page("/secret")[0] == 404


async def test_reflection_is_served_in_development_only() -> None:
    """Reflection requires the token."""
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    for development, expected in (
        (True, grpc.StatusCode.OK),
        (False, grpc.StatusCode.UNIMPLEMENTED),
    ):
        config = ServerConfig(development=development)
        async with started(Service(), config) as port, connect(f"127.0.0.1:{port}") as channel:
            reflect: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
            reflect = channel.stream_stream(method)
            call = reflect(iter([]))
            assert await call.code() is expected


async def test_a_lost_dependency_is_not_serving_but_alive() -> None:
    """Readiness follows the dependencies, and a question that fails is the answer no."""
    available = asyncio.Event()

    async def ready() -> bool:
        if not available.is_set():
            raise ConnectionError("the store is away")
        return True

    async with (
        started(Service(ready=ready), ServerConfig()) as port,
        connect(f"127.0.0.1:{port}") as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        states = aiter(watch)
        assert (await anext(states)).status == NOT_SERVING
        available.set()
        assert (await anext(states)).status == SERVING


def test_a_port_in_use_names_port_and_flag() -> None:
    """Exit 69, and the message names the cure."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flag in ("--port", "--admin-port"):
            ended = demo(f"{flag}={port}")
            assert ended.returncode == ExitCode.UNAVAILABLE
            assert f"port {port} on 127.0.0.1 is already in use; choose another with {flag}" in (
                ended.stderr
            )


async def test_sigterm_drains(tmp_path: Path) -> None:
    """After SIGTERM a call in flight finishes, a new one fails, the process exits with 0."""
    released = tmp_path / "released"
    with demo_process(tmp_path) as demo:
        async with connect(demo.target) as channel, connect(demo.target) as late_channel:
            request = rollout_service_pb2.GenerateRequest(rollout_id="wait", run_id=str(released))
            stub = async_stub(rollout_service_pb2_grpc.RolloutServiceStub, channel)
            events = aiter(stub.Generate(request))
            assert (await anext(events)).HasField("heartbeat")
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            async for state in watch:
                if state.status == SERVING:
                    demo.process.send_signal(signal.SIGTERM)
            late = async_stub(rollout_service_pb2_grpc.RolloutServiceStub, late_channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await late.StartRollout(rollout_service_pb2.StartRolloutRequest(), timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            released.touch()
            assert (await anext(events)).HasField("end")
        assert await _wait_for_exit(demo) == ExitCode.CLEAN


async def test_sigterm_abandons_the_start(tmp_path: Path) -> None:
    """A process that is still waiting for something ends at the first signal, with 0."""
    process = demo_popen("--mode=hang")
    with process:
        await asyncio.to_thread(_read_until, iter(process.stdout or ()), "hanging")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait) == ExitCode.CLEAN


async def test_drain_tells_the_service_and_waits_no_longer_than_asked() -> None:
    """The drain hook runs concurrently with calls in flight; one that hangs times out."""
    told = asyncio.Event()

    async def drain() -> None:
        told.set()
        await asyncio.Event().wait()

    async with started(Service(drain=drain), ServerConfig(drain_seconds=0.01)):
        assert not told.is_set()
    assert told.is_set()


async def test_the_second_signal_ends_it_now(tmp_path: Path) -> None:
    """A person who presses Ctrl-C twice does not wait for the calls in flight."""
    with demo_process(tmp_path, "--drain-seconds=600") as demo:
        async with connect(demo.target) as channel:
            request = rollout_service_pb2.GenerateRequest(
                rollout_id="wait", run_id=str(tmp_path / "never")
            )
            stub = async_stub(rollout_service_pb2_grpc.RolloutServiceStub, channel)
            events = aiter(stub.Generate(request))
            await anext(events)
            demo.process.send_signal(signal.SIGINT)
            lines = iter(demo.process.stdout or ())
            await asyncio.to_thread(_read_until, lines, '"draining"')
            demo.process.send_signal(signal.SIGINT)
            assert await _wait_for_exit(demo) == 128 + signal.SIGINT


def _read_until(lines: Iterator[str], text: str) -> None:
    for line in lines:
        if text in line:
            return
    raise AssertionError(f"the process ended without {text}")


def test_a_crashing_background_loop_ends_the_process(tmp_path: Path) -> None:
    """A failed background task ends the process: exit 70, with the cause in the logs only."""
    ended = demo("--mode=crash")
    assert ended.returncode == ExitCode.BUG
    crash = next(line for line in map(json.loads, ended.stdout.splitlines()) if "exception" in line)
    assert (crash["msg"], crash["level"], crash["service"]) == ("crashed", "critical", "demo")
    assert CANARY in json.dumps(crash["exception"])


@pytest.mark.parametrize("sees", [True, False])
async def test_a_frozen_server_is_noticed(tmp_path: Path, sees: bool) -> None:
    """A stopped process breaks the call; without the ping timeout the caller would wait on."""
    with demo_process(tmp_path) as demo:
        async with connect(demo.target, keepalive=fast_keepalive(sees=sees)) as channel:
            request = rollout_service_pb2.GenerateRequest(
                rollout_id="wait", run_id=str(tmp_path / "never")
            )
            stub = async_stub(rollout_service_pb2_grpc.RolloutServiceStub, channel)
            events = aiter(stub.Generate(request, timeout=5))
            await anext(events)
            demo.process.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as broken:
                await anext(events)
    noticed = broken.value.code() is grpc.StatusCode.UNAVAILABLE
    assert noticed is sees, broken.value


def test_the_defaults_notice_a_frozen_peer_within_15_s() -> None:
    """Until a ping is sent, and until it counts as lost; of callers and of servers."""
    found = dict(KEEPALIVE.options())
    lost = ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    assert found["grpc.keepalive_time_ms"] + max(found[name] for name in lost) <= 15_000
    assert found.items() <= dict(server_options()).items()


async def test_started_hands_on_what_the_test_raises() -> None:
    """A failing assertion inside the block arrives as itself."""
    with pytest.raises(ValueError, match="mine"):
        async with started(demo_service(), ServerConfig()):
            raise ValueError("mine")
