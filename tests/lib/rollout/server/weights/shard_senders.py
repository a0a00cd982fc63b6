"""Senders of shards over real gRPC that count, cut off, flip bits and go away."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from seamflow.network.keepalive import KEEPALIVE, Keepalive
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import (
    WeightServiceServicer,
    add_WeightServiceServicer_to_server,
)

from rollout.server.cli import WeightChannels
from rollout.server.config import RolloutServerConfig
from rollout.server.weights.transport import Incoming, LocalVersion
from rollout.server.weights.transports import TransportContext
from services.chassis.config.settings import ServerConfig
from services.chassis.errors import Reason, not_found, unavailable
from services.chassis.rpc.server import Service, started
from services.lib.weight_files.folder_names import open_regular, own_probe
from services.lib.weight_files.shard_chunks import OpenShard, decode_chunk, send_shards

MIB = 1 << 20


@dataclass
class Sender(WeightServiceServicer):
    """Answers FetchShards from folders, and RequestSources with `sources`; with scripted faults."""

    versions: dict[int, LocalVersion] = field(default_factory=dict)
    cut_after: int | None = None
    """Disconnect after this many chunks, once."""
    flip: set[int] = field(default_factory=set)
    """Offsets of chunks in which a bit flips on the way."""
    flips_left: int = 1
    """How many times that happens."""
    offers: Path | None = None
    """The folder of every version, for ProbeFolder; None if none is offered."""
    probe: pb.FolderProbe | None = None
    """What ProbeFolder claims is in it; None: what is there."""
    sources: dict[str, str] = field(default_factory=dict)
    """File -> address, for RequestSources."""
    replacement: str | None = None
    """Address that it names instead of one that was lost; None: the same again."""
    requests: list[pb.FetchShardsRequest] = field(default_factory=list)
    """What was asked for."""
    sent: list[tuple[str, int]] = field(default_factory=list)
    """File and offset of every chunk that was sent."""
    sent_bytes: int = 0
    """Length of all of them on the wire."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an answer of FetchShards has ended, also by the loss of its connection."""

    async def FetchShards(  # type: ignore[override]
        self, request: pb.FetchShardsRequest, context: Any
    ) -> AsyncIterator[bytes]:
        """The file asked for."""
        self.requests.append(request)
        context.add_done_callback(lambda _: self.ended.set())
        if request.weight_version not in self.versions:
            raise not_found("weight_version", str(request.weight_version))
        version = self.versions[request.weight_version]
        open_shard = partial(_opened, version.folder)
        async for message, _ in send_shards(request, version.manifest.files, open_shard):
            if self.cut_after is not None and self.cut_after <= 0:
                self.cut_after = None
                raise unavailable(Reason.DRAINING, "gone")
            chunk = decode_chunk(message)
            self.sent.append((chunk.name, chunk.offset))
            self.sent_bytes += len(message)
            if self.cut_after is not None:
                self.cut_after -= 1
            yield self._spoiled(message, chunk.offset)

    async def ProbeFolder(self, request: pb.ProbeFolderRequest, context: Any) -> Any:
        """As the test wants it."""
        if self.offers is None:
            return pb.ProbeFolderResponse()
        probe = self.probe or own_probe(self.offers)
        return pb.ProbeFolderResponse(folder=str(self.offers), probe=probe)

    async def RequestSources(self, request: pb.RequestSourcesRequest, context: Any) -> Any:
        """As the test wants it."""
        if request.lost_address and self.replacement is not None:
            for name, address in self.sources.items():
                if address == request.lost_address:
                    self.sources[name] = self.replacement
        files = [pb.FileSource(name=name, address=at) for name, at in self.sources.items()]
        return pb.RequestSourcesResponse(files=files)

    def _spoiled(self, message: bytes, offset: int) -> bytes:
        if offset not in self.flip or not self.flips_left:
            return message
        self.flips_left -= 1
        return message[:-100] + bytes([message[-100] ^ 4]) + message[-99:]

    @asynccontextmanager
    async def serving(self, keepalive: Keepalive = KEEPALIVE) -> AsyncIterator[int]:
        """Serve on a free port."""
        servicers = [(add_WeightServiceServicer_to_server, self)]
        service = Service(servicers=servicers, keepalive=keepalive)
        async with started(service, ServerConfig(drain_seconds=0.0), "sender") as port:
            yield port


async def _opened(folder: Path, file: pb.WeightFile) -> OpenShard:
    return OpenShard(described=file, file=open_regular(folder / file.name))


def make_version(folder: Path, weight_version: int = 1, **files: bytes) -> LocalVersion:
    """A version of these files; by default one of 5.3 MiB and a small one."""
    contents = files or {
        "config.json": b"{}",
        "model.safetensors": np.random.default_rng(weight_version).bytes(5 * MIB + 300_001),
    }
    folder.mkdir(parents=True)
    manifest = pb.Manifest(run_id="run", model="policy", weight_version=weight_version)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        manifest.files.add(name=name, num_bytes=len(data), sha256=digest)
    return LocalVersion(manifest=manifest, folder=folder)


@dataclass
class Receiver:
    """A rollout server's side: where versions come to, and the context of its transports."""

    context: TransportContext
    folder: Path

    def incoming(self, version: LocalVersion) -> Incoming:
        """The version on its way, or what an earlier life of this server left of it."""
        self.folder.mkdir(exist_ok=True)
        return Incoming(version.manifest, self.folder)


@asynccontextmanager
async def receiver(sender: Sender, folder: Path, **config: Any) -> AsyncIterator[Receiver]:
    """A receiver of `sender`, which stands for the weights service."""
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(sender.serving())
        settings = RolloutServerConfig(engine="fake", run_id="run", **config)
        connect = WeightChannels(settings, stack).connect
        weights = connect(f"127.0.0.1:{port}")
        yield Receiver(TransportContext(config=settings, weights=weights, connect=connect), folder)


def same_files(version: LocalVersion, folder: Path) -> bool:
    """Whether all files of the version are in `folder`, byte for byte."""
    return all(
        (folder / file.name).read_bytes() == (version.folder / file.name).read_bytes()
        for file in version.manifest.files
    )
