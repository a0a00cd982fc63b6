"""Servers that send each other weights, with the real weights service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from rollout.server.config import RolloutServerConfig
from rollout.server.weights import relay_server
from rollout.server.weights.transport import Incoming, LocalVersion
from rollout.server.weights.transports import shard_stream
from services.chassis.errors import ServiceError
from services.chassis.rpc.server import started
from services.lib.weight_files import shard_chunks
from services.lib.weight_files.shard_chunks import decode_chunk
from services.weights import servicer
from services.weights.config import WeightsConfig
from tests.lib.redis_server import free_port
from tests.lib.rollout.server.client import fake_config, serving
from tests.lib.rollout.server.weights.shard_senders import MIB, make_version
from tests.lib.weights.support import Trainer, in_memory

SERVERS = 4
FILES = 4


def free_addresses(count: int) -> list[str]:
    """Loopback addresses without a listener."""
    return [f"127.0.0.1:{free_port()}" for _ in range(count)]


async def bytes_sent_by_service(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    relaying: bool,
    dead: int = 0,
    zones: Sequence[str] = ("",) * SERVERS,
) -> float:
    """Publish to four servers and wait until all serve it; bytes the service sent / its size.

    Args:
        tmp_path: for what is published.
        monkeypatch: counts.
        relaying: whether the servers send each other files.
        dead: servers that are registered in the first zone and do not exist.
        zones: of the servers.
    """
    contents = {
        f"model-{number}.safetensors": np.random.default_rng(number).bytes(2 * MIB)
        for number in range(FILES)
    }
    version = make_version(tmp_path / "made", 1, **contents)
    async with AsyncExitStack() as stack:
        port, sent = await counting_service(stack, tmp_path, monkeypatch)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        stub = async_stub(WeightServiceStub, channel)
        addresses = free_addresses(SERVERS + dead)
        if relaying:
            await register(stub, addresses, [*zones, *[zones[0]] * dead])
        servers = [
            relaying_config(port, address, zone, relaying=relaying)
            for address, zone in zip(addresses, zones, strict=False)
        ]
        clients = [await stack.enter_async_context(serving(server)) for server in servers]
        for client in clients:
            await client.serving(0)
        await Trainer(stub=stub).publish_uploaded(1, contents)
        for client in clients:
            await client.serving(1)
    return sum(sent) / sum(file.num_bytes for file in version.manifest.files)


async def counting_service(
    stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[int]]:
    """Start a weights service; its port, and the lengths of all that it sends."""
    config = WeightsConfig(
        redis_url="redis://oracle", folder=tmp_path / "published", port=0, drain_seconds=0.0
    )
    service = in_memory(config)
    sent: list[int] = []
    send = shard_chunks.send_shards

    async def counted(*arguments: Any) -> Any:
        async for message, size in send(*arguments):
            sent.append(size)
            yield message, size

    monkeypatch.setattr(servicer, "send_shards", counted)
    return await stack.enter_async_context(started(service, config, "weights")), sent


async def register(stub: Any, addresses: Sequence[str], zones: Sequence[str]) -> None:
    """Register servers before they start, so that the trees are complete from the first file on."""
    for address, zone in zip(addresses, zones, strict=True):
        request = pb.RequestSourcesRequest(run_id="run", address=address, zone=zone)
        await stub.RequestSources(request)


def relaying_config(
    weights_port: int, address: str, zone: str, *, relaying: bool
) -> RolloutServerConfig:
    """A server at `address` that takes weights from others first."""
    return fake_config(
        weights=f"127.0.0.1:{weights_port}",
        port=int(address.rpartition(":")[2]),
        drain_seconds=0.0,
        weight_transports=("relay", "shard_stream"),
        weight_relay_address=address if relaying else None,
        zone=zone,
    )


async def test_the_weights_service_sends_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four servers get a version of which the service sent each byte a single time."""
    assert await bytes_sent_by_service(tmp_path, monkeypatch, relaying=True) == 1.0


async def test_without_relaying_it_sends_each_file_to_everyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: four servers, four times the bytes."""
    assert await bytes_sent_by_service(tmp_path, monkeypatch, relaying=False) == SERVERS


async def test_another_leader_takes_the_place_of_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of six known servers do not exist: the service still sends each byte a single time."""
    assert await bytes_sent_by_service(tmp_path, monkeypatch, relaying=True, dead=2) == 1.0


async def test_without_another_source_the_service_sends_what_the_dead_one_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above; all serve the version all the same."""
    monkeypatch.setattr(shard_stream, "_SOURCES", 1)
    # Files of other servers stall for as long; by default for 10 s, again and again.
    for name in ("_BEGIN_SECONDS", "_STALL_SECONDS"):
        monkeypatch.setattr(relay_server, name, 0.5)
    sent = await bytes_sent_by_service(tmp_path, monkeypatch, relaying=True, dead=2)
    assert 1.0 < sent < SERVERS


@pytest.mark.parametrize(
    ("zones", "copies"),
    [(("east", "east", "west", "west"), 2.0), (("", "west", "west", "west"), 2.0)],
)
async def test_one_copy_enters_each_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zones: Sequence[str], copies: float
) -> None:
    """Whatever its number of servers, and also into the zone without a name."""
    sent = await bytes_sent_by_service(tmp_path, monkeypatch, relaying=True, zones=zones)
    assert sent == copies


class Arriving:
    """A cache with one version on its way."""

    run_id, model = "run", "policy"

    def __init__(self, incoming: Incoming) -> None:
        self.incoming = incoming

    async def arrival(self, weight_version: int) -> Incoming:
        """The version, or a wait without an end."""
        if weight_version != self.incoming.manifest.weight_version:
            await asyncio.Event().wait()
        return self.incoming


async def test_a_version_is_passed_on_while_it_arrives(tmp_path: Path) -> None:
    """Verified bytes go out at once, the rest as it comes, whatever the file is called by then."""
    version = make_version(tmp_path / "published")
    (tmp_path / "weight_v000001.partial").mkdir()
    incoming = Incoming(version.manifest, tmp_path / "weight_v000001.partial")
    file = version.manifest.files[1]
    data = (version.folder / file.name).read_bytes()
    cache: Any = Arriving(incoming)
    request = pb.FetchShardsRequest(run_id="run", weight_version=1, names=[file.name])
    sending = relay_server.RelayServicer(cache).FetchShards(request, None)
    incoming.part(file).write_bytes(data[:MIB])
    incoming.advance(file, MIB)
    chunks = [decode_chunk(await anext(sending))]
    assert bytes(chunks[0].data) == data[:MIB]
    with incoming.part(file).open("ab") as opened:
        opened.write(data[MIB:])
    incoming.complete(file)
    incoming.folder.rename(tmp_path / "weight_v000001")
    chunks += [decode_chunk(message) async for message in sending]
    assert b"".join(bytes(chunk.data) for chunk in chunks) == data


async def test_a_link_into_a_shared_folder_is_passed_on(tmp_path: Path) -> None:
    """A cache on another file system than the shared folder holds links, and relays them too."""
    version = make_version(tmp_path / "published")
    (tmp_path / "cache").mkdir()
    for path in version.folder.iterdir():
        (tmp_path / "cache" / path.name).symlink_to(path)
    linked = LocalVersion(manifest=version.manifest, folder=tmp_path / "cache")
    name = version.manifest.files[1].name
    shard = await relay_server.open_local(linked, version.manifest.files[1])
    with shard.file:
        assert shard.read(0, 100) == (version.folder / name).read_bytes()[:100]


async def test_a_child_is_not_kept_waiting_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that does not arrive or stalls is an error, so children use another source."""
    version = make_version(tmp_path / "published")
    (tmp_path / "to").mkdir()
    cache: Any = Arriving(Incoming(version.manifest, tmp_path / "to"))
    for name in ("_BEGIN_SECONDS", "_STALL_SECONDS"):
        monkeypatch.setattr(relay_server, name, 0.02)
    for number, code in (
        (2, grpc.StatusCode.NOT_FOUND),
        (1, grpc.StatusCode.UNAVAILABLE),
    ):
        request = pb.FetchShardsRequest(
            run_id="run", weight_version=number, names=["model.safetensors"]
        )
        with pytest.raises(ServiceError) as refused:
            await anext(relay_server.RelayServicer(cache).FetchShards(request, None))
        assert refused.value.code is code
