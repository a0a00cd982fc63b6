"""Tokens and certificates that are rotated while both sides run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import seamflow.credentials
from seamflow.channel import connect
from seamflow.rollout.v1 import rollout_service_pb2, rollout_service_pb2_grpc

from services.chassis.config.settings import FileSecret, ServerConfig
from services.chassis.errors import ConfigError, ServiceError
from services.chassis.rpc.clients import credentials
from services.chassis.rpc.identities import SERVICES, URI, AcceptedToken, Callers, Identity
from services.chassis.rpc.server import Service, started
from tests.lib.certificates import Authority, Certificate
from tests.lib.chassis.support import DemoServicer

START = "/seamflow.rollout.v1.RolloutService/StartRollout"
OK, STRANGER = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(autouse=True)
def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at on each question, not once a second."""
    monkeypatch.setattr(seamflow.credentials, "_LOOK_SECONDS", 0.0)


def replaced(file: Path, text: str) -> None:
    """Write a file as a rotation does: beside it, then renamed."""
    partial = file.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(file)


def bearer(token: str) -> dict[str, str | bytes]:
    """Metadata of a call."""
    return {"authorization": f"Bearer {token}"}


def test_a_replaced_token_is_accepted_for_the_overlap(tmp_path: Path) -> None:
    """Both for a while, then the new one alone; a token before the last is gone."""
    file, now = tmp_path / "token", 0.0
    file.write_text("first")
    config = ServerConfig(token=FileSecret(file), token_overlap_seconds=60)
    callers = Callers(config)
    for accepted in callers._tokens:
        accepted._clock = lambda: now

    def opened() -> list[str]:
        found = []
        for token in ("first", "second", "third"):
            try:
                assert callers.caller(bearer(token), None) > SERVICES
                found.append(token)
            except ServiceError:
                pass
        return found

    assert opened() == ["first"]
    replaced(file, "second")
    assert opened() == ["first", "second"]
    now = 59.0
    assert opened() == ["first", "second"]
    now = 60.0
    assert opened() == ["second"]
    replaced(file, "third")
    assert opened() == ["second", "third"]
    file.unlink()  # while it is replaced
    assert opened() == ["second", "third"]


def test_a_new_token_is_known_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that is quicker than the next look is not refused."""
    monkeypatch.setattr(seamflow.credentials, "_LOOK_SECONDS", 3600.0)
    file = tmp_path / "token"
    file.write_text("first")
    callers = Callers(ServerConfig(token=FileSecret(file)))
    replaced(file, "second")
    assert callers.caller(bearer("second"), None)
    with monkeypatch.context() as control:  # without looking again it is a stranger's
        control.setattr(AcceptedToken, "look", lambda _: None)
        replaced(file, "third")
        with pytest.raises(ServiceError):
            callers.caller(bearer("third"), None)


@asynccontextmanager
async def demo(config: ServerConfig) -> AsyncIterator[str]:
    """A server that anyone known may call as an agent."""
    add = rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server
    async with started(Service([(add, DemoServicer())]), config) as port:
        yield f"127.0.0.1:{port}"


def channel_of(address: str, certificate: Certificate) -> grpc.aio.Channel:
    """A channel with the certificate."""
    return connect(address, credentials(ServerConfig(**certificate.settings)))


async def code_of(call: Any) -> grpc.StatusCode:
    """How a call of StartRollout ends."""
    try:
        await call(rollout_service_pb2.StartRolloutRequest().SerializeToString())
    except grpc.aio.AioRpcError as error:
        return error.code()
    return OK


async def test_a_channel_presents_the_renewed_token(tmp_path: Path) -> None:
    """One that was opened before the rotation, whose stubs were made before it."""
    file = tmp_path / "token"
    file.write_text("first")
    server = ServerConfig(token=FileSecret(file), token_overlap_seconds=0, drain_seconds=0)
    fixed = ServerConfig(token="first")
    async with demo(server) as address:
        following = connect(address, credentials(ServerConfig(token=FileSecret(file))))
        holding = connect(address, credentials(fixed))
        async with following, holding:
            calls: list[Any] = [each.unary_unary(START) for each in (following, holding)]
            assert [await code_of(call) for call in calls] == [OK, OK]
            replaced(file, "second")
            assert [await code_of(call) for call in calls] == [OK, STRANGER]


async def test_a_channel_presents_the_renewed_certificate(tmp_path: Path) -> None:
    """New calls reconnect with it, a call under way goes on."""
    authority = Authority(tmp_path)
    server = authority.issue("server")
    mine = authority.issue("mine", f"{URI}{Identity.TRAINER}")
    config = ServerConfig(certificate_identities=True, drain_seconds=0, **server.settings)
    async with demo(config) as address, channel_of(address, mine) as channel:
        call: Any = channel.unary_unary(START)
        assert await code_of(call) is grpc.StatusCode.PERMISSION_DENIED
        authority.issue("mine", f"{URI}{Identity.AGENT}")
        assert await code_of(call) is OK


async def test_calls_under_way_survive_the_renewal(tmp_path: Path) -> None:
    """A stream that began with the old certificate ends on the old connection."""
    authority = Authority(tmp_path)
    server, mine = authority.issue("server"), authority.issue("mine", f"{URI}{Identity.AGENT}")
    config = ServerConfig(certificate_identities=True, drain_seconds=0, **server.settings)
    released = tmp_path / "released"
    request = rollout_service_pb2.GenerateRequest(rollout_id="wait", run_id=str(released))
    async with demo(config) as address, channel_of(address, mine) as channel:
        stub: Any = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        events = aiter(stub.Generate(request))
        await anext(events)
        authority.issue("mine", f"{URI}{Identity.AGENT}")
        assert await code_of(channel.unary_unary(START)) is OK
        released.touch()
        async with asyncio.timeout(10):
            assert (await anext(events)).HasField("end")


async def test_a_certificate_that_is_half_replaced_is_read_again(tmp_path: Path) -> None:
    """A missing file keeps the old connection, and its return is seen."""
    authority = Authority(tmp_path)
    server, mine = authority.issue("server"), authority.issue("mine", f"{URI}{Identity.AGENT}")
    config = ServerConfig(certificate_identities=True, drain_seconds=0, **server.settings)
    async with demo(config) as address, channel_of(address, mine) as channel:
        call: Any = channel.unary_unary(START)
        assert await code_of(call) is OK
        mine.cert_file.unlink()
        assert await code_of(call) is OK
        authority.issue("mine", f"{URI}{Identity.TRAINER}")
        assert await code_of(call) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("triner", "secret", "names no service"),
        ("trainer", "", "is empty"),
        ("agent", "secret", "names no service"),
    ],
)
def test_a_token_file_that_cannot_work_is_named(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    """At the start, with the file; not at the first call."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"service_tokens_folder: .*{name}.*{says}"):
        Callers(ServerConfig(service_tokens_folder=tmp_path))
    with pytest.raises(ConfigError, match=r"service_tokens_folder: .*No such file"):
        Callers(ServerConfig(service_tokens_folder=tmp_path / "absent"))
