"""The wire: who is let in, what is noticed, how much fits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from seamflow.rollout.v1 import rollout_service_pb2, rollout_service_pb2_grpc

from services.chassis.config.load import ConfigError
from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.clients import channel
from services.chassis.rpc.server import Service, started
from tests.lib.certificates import Authority
from tests.lib.chassis.support import DemoServicer, demo_service, fast_keepalive, frozen_caller

CHECK = "/grpc.health.v1.Health/Check"


def _config(folder: Path, authority: trustme.CA, name: str) -> ServerConfig:
    """A configuration with a certificate for 127.0.0.1 that `authority` signed."""
    certificate = authority.issue_cert("127.0.0.1")
    paths = [folder / f"{name}.{kind}" for kind in ("ca", "cert", "key")]
    authority.cert_pem.write_to_path(paths[0])
    certificate.cert_chain_pems[0].write_to_path(paths[1])
    certificate.private_key_pem.write_to_path(paths[2])
    return ServerConfig(tls_ca_file=paths[0], tls_cert_file=paths[1], tls_key_file=paths[2])


def _raw(opened: grpc.aio.Channel, method: str) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
    """`method` with serialized messages."""
    return opened.unary_unary(method)


async def _code(caller: ServerConfig, port: int) -> grpc.StatusCode:
    async with channel(caller, f"127.0.0.1:{port}") as opened:
        try:
            await _raw(opened, CHECK)(b"", timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_only_our_authority_is_let_in(tmp_path: Path) -> None:
    """Mutual TLS: a deployment certificate passes; none, a foreign one and plaintext fail."""
    ours, foreign = trustme.CA(), trustme.CA()
    config = _config(tmp_path, ours, "server")
    peer = _config(tmp_path, ours, "peer")
    stranger = _config(tmp_path, foreign, "stranger")
    disguised = ServerConfig(
        tls_ca_file=peer.tls_ca_file,
        tls_cert_file=stranger.tls_cert_file,
        tls_key_file=stranger.tls_key_file,
    )
    anonymous = ServerConfig(tls_ca_file=peer.tls_ca_file)
    async with started(demo_service(), config) as port:
        assert await _code(peer, port) is grpc.StatusCode.OK
        for caller in (anonymous, disguised, stranger, ServerConfig()):
            assert await _code(caller, port) is grpc.StatusCode.UNAVAILABLE


async def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    """Of a caller; one that is valid passes, by the same authority."""
    ours = Authority(tmp_path)
    config = ServerConfig(**ours.issue("server").settings)
    codes = {}
    async with started(demo_service(), config) as port:
        for valid in (True, False):
            peer = ServerConfig(**ours.issue(f"peer-{valid}", valid=valid).settings)
            codes[valid] = await _code(peer, port)
    assert codes == {True: grpc.StatusCode.OK, False: grpc.StatusCode.UNAVAILABLE}


async def test_without_an_authority_any_caller_may_connect(tmp_path: Path) -> None:
    """Negative control: a server certificate alone encrypts and lets everyone in."""
    ours = trustme.CA()
    config = _config(tmp_path, ours, "server")
    one_way = ServerConfig(tls_cert_file=config.tls_cert_file, tls_key_file=config.tls_key_file)
    async with started(demo_service(), one_way) as port:
        assert await _code(ServerConfig(tls_ca_file=config.tls_ca_file), port) is grpc.StatusCode.OK


async def test_rotated_certificates_need_no_restart(tmp_path: Path) -> None:
    """New files count for the next connection; connections that are open stay open."""
    config = _config(tmp_path, trustme.CA(), "server")
    async with started(demo_service(), config) as port:
        before = channel(config, f"127.0.0.1:{port}")
        await _raw(before, CHECK)(b"", timeout=5)
        rotated = _config(tmp_path, trustme.CA(), "server")
        assert await _code(rotated, port) is grpc.StatusCode.OK
        await _raw(before, CHECK)(b"", timeout=5)
        await before.close()


async def test_an_unusable_certificate_is_named(tmp_path: Path) -> None:
    """The message blames the file, not the port."""
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    config = ServerConfig(tls_cert_file=junk, tls_key_file=junk)
    with pytest.raises(ConfigError, match=r"tls_cert_file .*junk.pem"):
        async with started(demo_service(), config):
            pass


FROZEN_CALLER = """
import asyncio, sys
from seamflow.channel import connect
from seamflow.rollout.v1 import rollout_service_pb2, rollout_service_pb2_grpc

async def main():
    async with connect(sys.argv[1]) as channel:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        async for event in stub.Generate(rollout_service_pb2.GenerateRequest()):
            print("heard", flush=True)

asyncio.run(main())
"""


class _Talking(DemoServicer):
    """Sends one event, then waits until the caller is gone."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield rollout_service_pb2.GenerateResponse()
            await asyncio.Event().wait()
        finally:
            self.gone.set()


@pytest.mark.parametrize("sees", [True, False])
async def test_a_frozen_caller_is_noticed(sees: bool) -> None:
    """A stopped caller's call is cancelled; without the ping timeout it would continue."""
    faster = fast_keepalive(sees=sees)
    servicer = _Talking()
    add = rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server
    async with (
        started(
            Service([(add, servicer)], keepalive=faster), ServerConfig(drain_seconds=0)
        ) as port,
        frozen_caller(FROZEN_CALLER, f"127.0.0.1:{port}"),
    ):
        try:
            async with asyncio.timeout(5):
                await servicer.gone.wait()
            noticed = True
        except TimeoutError:
            noticed = False
    assert noticed is sees


@pytest.mark.parametrize("size", [5, 65])
async def test_the_message_limit_is_64_mib(size: int) -> None:
    """A message beyond gRPC's 4 MiB passes, one beyond ours is RESOURCE_EXHAUSTED."""
    # Field 15, unknown to the request and skipped by the parser, holds the padding.
    padding = size * 1024 * 1024
    request = b"\x7a" + _varint(padding) + bytes(padding)
    async with started(demo_service(), ServerConfig()) as port:
        config = ServerConfig()
        async with channel(config, f"127.0.0.1:{port}") as opened:
            call = _raw(opened, "/seamflow.rollout.v1.RolloutService/StartRollout")(request)
            expected = grpc.StatusCode.OK if size == 5 else grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await call.code() is expected


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
