"""A service that was never reached is an error within seconds; an interruption is waited out."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import grpc.aio
import pytest
from seamflow import Client
from seamflow.channel import CONNECT_TIMEOUT, connect
from seamflow.errors import DeadlineError, UnavailableError
from seamflow.retry import retrying
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_service_pb2_grpc import (
    RolloutServiceStub,
    add_RolloutServiceServicer_to_server,
)
from seamflow.stubs import async_stub

from tests.lib.sdk.support import Gateway, serving

REQUEST = pb.StartRolloutRequest(run_id="run", rollout_id="r")


@pytest.fixture
def closed() -> str:
    """An address that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


async def start(channel: grpc.aio.Channel, **options: Any) -> pb.StartRolloutResponse:
    """StartRollout, retried."""
    stub = async_stub(RolloutServiceStub, channel)
    return await retrying(lambda: stub.StartRollout(REQUEST), **options)


async def test_a_closed_port_is_named_with_its_cause_and_the_cure(closed: str) -> None:
    """The error says where, why and what to do; the default is seconds, not for ever."""
    assert 1 <= CONNECT_TIMEOUT <= 15
    async with connect(closed, connect_timeout=0.5) as channel:
        with pytest.raises(UnavailableError) as raised:
            await start(channel)
    for part in (f"no connection to {closed}", "refused", "check the address"):
        assert part in str(raised.value)


async def test_an_unknown_host_is_named() -> None:
    """A name that does not resolve fails like a closed port."""
    async with connect("nowhere.invalid:1", connect_timeout=0.5) as channel:
        with pytest.raises(UnavailableError, match=r"no connection to nowhere\.invalid:1"):
            await start(channel)


@pytest.mark.parametrize("call", ["start_rollout", "generate"])
async def test_an_agents_first_call_ends(closed: str, call: str) -> None:
    """Unary and streamed calls of the client give up alike."""
    async with Client(closed, run_id="run", connect_timeout=0.5) as client:
        with pytest.raises(UnavailableError, match=closed):
            if call == "start_rollout":
                await client.start_rollout()
            await client.rollout("r", "").generate(token_ids=[1])


async def test_services_wait_for_each_other(closed: str) -> None:
    """Negative control: without a connect_timeout the same port is waited for, and then answers."""
    async with connect(closed, connect_timeout=None) as channel:
        waiting = asyncio.create_task(start(channel))
        done, _ = await asyncio.wait([waiting], timeout=1.5)
        assert not done
        async with serving((add_RolloutServiceServicer_to_server, Gateway()), address=closed):
            assert await waiting


async def test_an_interruption_is_longer_than_a_first_contact(closed: str) -> None:
    """A channel that was connected once retries through a pause beyond connect_timeout."""
    async with connect(closed, connect_timeout=0.2) as channel:
        async with serving((add_RolloutServiceServicer_to_server, Gateway()), address=closed):
            assert await start(channel)
        waiting = asyncio.create_task(start(channel))
        done, _ = await asyncio.wait([waiting], timeout=1.5)
        assert not done
        async with serving((add_RolloutServiceServicer_to_server, Gateway()), address=closed):
            assert await waiting


async def test_the_first_retry_is_logged_once(
    closed: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line names rpc, address and cause, however often the call is repeated."""
    with caplog.at_level(logging.WARNING, "seamflow"):
        async with connect(closed, connect_timeout=None) as channel:
            with pytest.raises(DeadlineError, match=r"Rollout .*within 1 s; the last failure:"):
                await start(channel, timeout=1.0)
        (line,) = [r.getMessage() for r in caplog.records if r.name == "seamflow"]
    assert f"/seamflow.rollout.v1.RolloutService/StartRollout of {closed} failed" in line
    assert "refused" in line


async def test_a_call_that_succeeds_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Negative control."""
    async with (
        serving((add_RolloutServiceServicer_to_server, Gateway())) as address,
        connect(address) as channel,
    ):
        assert await start(channel)
    assert [r.getMessage() for r in caplog.records if r.name == "seamflow"] == []
