"""Files that rollout servers send each other: who sends which, and when."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from seamflow.weights.v1 import weight_service_pb2 as pb

from rollout.server.weights.transport import (
    Incoming,
    LocalVersion,
    SourceLost,
)
from rollout.server.weights.transports.shard_stream import Relay, ShardStream
from services.lib.weight_files.shard_chunks import decode_chunk
from tests.lib.redis_server import free_port
from tests.lib.rollout.server.weights.shard_senders import (
    Sender,
    make_version,
    receiver,
    same_files,
)

BIG = "model.safetensors"


@pytest.fixture
def version(tmp_path: Path) -> LocalVersion:
    """Version 1 of two files, one of six chunks."""
    return make_version(tmp_path / "published")


@dataclass
class HoldingSender(Sender):
    """Waits before each chunk but the first until the one before can be relayed."""

    incoming: Incoming | None = None

    async def FetchShards(  # type: ignore[override]
        self, request: pb.FetchShardsRequest, context: Any
    ) -> AsyncIterator[bytes]:
        """The file asked for."""
        (file,) = (
            each for each in self.versions[1].manifest.files if each.name == request.names[0]
        )
        sent = 0
        async for message in super().FetchShards(request, context):
            if sent:
                assert self.incoming is not None
                await asyncio.wait_for(self.incoming.beyond(file, sent - 1), 10)
            yield message
            sent += decode_chunk(message).num_bytes


async def test_on_a_slow_link_each_chunk_is_relayed_as_it_comes(
    version: LocalVersion, tmp_path: Path
) -> None:
    """None waits for others behind it, which come late."""
    sender = HoldingSender({1: version})
    async with receiver(sender, tmp_path / "to") as to:
        sender.incoming = to.incoming(version)
        await ShardStream(to.context).fetch(sender.incoming)
    assert same_files(version, to.folder)
    assert len(sender.requests) == 2


@dataclass
class WaitingSender(Sender):
    """Sends a file once another sender has been asked for its own."""

    other: Sender | None = None

    async def FetchShards(  # type: ignore[override]
        self, request: pb.FetchShardsRequest, context: Any
    ) -> AsyncIterator[bytes]:
        """The file asked for."""
        while self.other is not None and not self.other.requests:
            await asyncio.sleep(0.001)
        async for message in super().FetchShards(request, context):
            yield message


async def test_a_leader_fetches_its_own_files_while_others_keep_it_waiting(
    tmp_path: Path,
) -> None:
    """With one stream: each sender has its own, so that the link is not idle meanwhile."""
    version = make_version(tmp_path / "published", 1, **{"a": b"theirs", "b": b"own"})
    service = Sender({1: version})
    other = WaitingSender({1: version}, other=service)
    async with other.serving() as port:
        service.sources = {"a": f"127.0.0.1:{port}"}
        async with (
            receiver(service, tmp_path / "to", weight_streams=1) as to,
            asyncio.timeout(10),
        ):
            await Relay(to.context).fetch(to.incoming(version))
    assert same_files(version, to.folder)
    assert [request.names for request in (*service.requests, *other.requests)] == [["b"], ["a"]]


async def test_files_come_from_the_servers_that_were_named(
    version: LocalVersion, tmp_path: Path
) -> None:
    """Each file is asked of its parent; the weights service sends only what it was named for."""
    weights, parent = Sender({1: version}), Sender({1: version})
    async with parent.serving() as port:
        weights.sources = {"config.json": "", BIG: f"127.0.0.1:{port}"}
        async with receiver(weights, tmp_path / "to") as to:
            await Relay(to.context).fetch(to.incoming(version))
    assert same_files(version, to.folder)
    assert [list(request.names) for request in weights.requests] == [["config.json"]]
    assert [list(request.names) for request in parent.requests] == [[BIG]]


async def test_a_parent_lost_in_the_middle_costs_only_what_it_did_not_send(
    version: LocalVersion, tmp_path: Path
) -> None:
    """The relay continues from the source that is named instead."""
    weights = Sender({1: version}, replacement="")
    parent = Sender({1: version}, cut_after=2)
    async with parent.serving() as port:
        weights.sources = {"config.json": "", BIG: f"127.0.0.1:{port}"}
        async with receiver(weights, tmp_path / "to") as to:
            await Relay(to.context).fetch(to.incoming(version))
    assert same_files(version, to.folder)
    assert weights.requests[-1].offset > 0
    assert set(Counter(weights.sent + parent.sent).values()) == {1}


@pytest.mark.parametrize("is_there", [True, False])
async def test_where_no_other_parent_is_named_the_next_transport_brings_the_file(
    version: LocalVersion, tmp_path: Path, is_there: bool
) -> None:
    """The relay fails by name, whether its parent does not answer or does not have the version."""
    parent, weights = Sender({}), Sender({1: version})
    async with parent.serving() as port:
        address = f"127.0.0.1:{port if is_there else free_port()}"
        weights.sources = {"config.json": "", BIG: address}
        async with receiver(weights, tmp_path / "to") as to:
            incoming = to.incoming(version)
            with pytest.raises(SourceLost, match=address):
                await Relay(to.context).fetch(incoming)
            assert (to.folder / "config.json").exists()
            await ShardStream(to.context).fetch(incoming)
    assert same_files(version, to.folder)
    assert set(Counter(weights.sent + parent.sent).values()) == {1}
