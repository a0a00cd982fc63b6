"""Releases that cannot work together say so at the first call."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from seamflow import channel as channel_module
from seamflow.channel import connect
from seamflow.errors import PreconditionError, decode
from seamflow.release import HEADER, RELEASE

from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.server import started
from tests.lib.chassis.support import demo_service

START = "/seamflow.rollout.v1.RolloutService/StartRollout"


MAJOR, MINOR = (int(part) for part in RELEASE.split("."))


async def start(port: int, **options: Any) -> None:
    """A call of this release, or with other metadata on a plain channel."""
    address = f"127.0.0.1:{port}"
    async with (
        grpc.aio.insecure_channel(address) if options else connect(address) as channel,
    ):
        call: Any = channel.unary_unary(START)
        await call(b"", timeout=10, **options)


async def test_a_caller_of_a_far_release_is_refused() -> None:
    """FAILED_PRECONDITION with both releases, the service and the cure, again and again."""
    far = f"{MAJOR}.{MINOR + 2}"
    async with started(demo_service(), ServerConfig(), "demo") as port:
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await start(port, metadata=((HEADER, far),))
            error = decode(refused.value)
            assert isinstance(error, PreconditionError)
            assert error.reason == "RELEASES_TOO_FAR_APART"
            assert error.metadata["caller_release"] == far
            assert error.metadata["server_release"] == RELEASE
            for part in (far, RELEASE, "demo", "update"):
                assert part in str(error)


async def test_near_and_unknown_callers_are_served() -> None:
    """Negative control: this release, the next one, and a foreign client without the header."""
    async with started(demo_service(), ServerConfig()) as port:
        await start(port)
        await start(port, metadata=((HEADER, f"{MAJOR}.{MINOR + 1}"),))
        await start(port, metadata=(("other", "1"),))


async def test_this_package_sends_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `connect` sends is checked: with another release it is refused."""
    async with started(demo_service(), ServerConfig()) as port:
        monkeypatch.setattr(channel_module, "RELEASE", f"{MAJOR + 1}.0")
        with pytest.raises(grpc.aio.AioRpcError, match="update the older one"):
            await start(port)
