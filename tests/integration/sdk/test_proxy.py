"""Proxies of the environment are never used for this machine; elsewhere they are, and are named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from seamflow.channel import connect, is_loopback
from seamflow.errors import UnavailableError
from seamflow.retry import retrying
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_service_pb2_grpc import (
    RolloutServiceStub,
    add_RolloutServiceServicer_to_server,
)
from seamflow.stubs import async_stub

from services.launcher.supervisor import child_environment
from tests.lib.sdk.support import Gateway, serving

REQUEST = pb.StartRolloutRequest(run_id="run", rollout_id="r")
VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")


@pytest.fixture(params=VARIABLES)
async def asked(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[str]]:
    """First lines of what a proxy was asked, which a variable of the environment names."""
    for name in (*VARIABLES, "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with _proxy() as (address, lines):
        monkeypatch.setenv(request.param, f"http://{address}")
        yield lines


async def test_this_machine_is_reached_directly(asked: list[str]) -> None:
    """By address and by name; control: gRPC alone asks the proxy."""
    async with serving((add_RolloutServiceServicer_to_server, Gateway())) as address:
        port = address.rpartition(":")[2]
        for target in (f"127.0.0.1:{port}", f"localhost:{port}", f"ipv4:127.0.0.1:{port}"):
            async with connect(target) as channel:
                stub = async_stub(RolloutServiceStub, channel)
                await retrying(lambda stub=stub: stub.StartRollout(REQUEST), timeout=60)  # type: ignore[misc]
        assert asked == []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await async_stub(RolloutServiceStub, plain).StartRollout(REQUEST)
        assert f"CONNECT 127.0.0.1:{port}" in asked[0]


async def test_other_machines_are_reached_through_it(asked: list[str]) -> None:
    """Which the error says, with the name of the variable."""
    async with connect("elsewhere.invalid:1", connect_timeout=0.5) as channel:
        stub = async_stub(RolloutServiceStub, channel)
        with pytest.raises(UnavailableError, match=r"_proxy is set"):
            await retrying(lambda: stub.StartRollout(REQUEST), timeout=60)
    assert "CONNECT elsewhere.invalid:1" in asked[0]


def test_children_of_a_run_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """By any library: the exceptions of the user stay."""
    monkeypatch.setenv("no_proxy", "inside.example, localhost")
    monkeypatch.delenv("NO_PROXY", raising=False)
    environment = child_environment({})
    assert environment["no_proxy"] == "inside.example,localhost,127.0.0.1,::1"
    assert environment["NO_PROXY"] == "localhost,127.0.0.1,::1"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "a.localhost", "127.9.9.9", "[::1]"])
def test_loopback(host: str) -> None:
    """In all its forms."""
    assert is_loopback(host)
    assert not is_loopback(f"{host}.example")


@asynccontextmanager
async def _proxy() -> AsyncIterator[tuple[str, list[str]]]:
    lines: list[str] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append((await reader.readline()).decode())
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"{host}:{port}", lines
