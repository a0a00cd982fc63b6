"""Weights over several connections, for links on which one carries too little."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seamflow.weights.v1 import weight_service_pb2 as pb

from rollout.server.config import RolloutServerConfig
from rollout.server.weights.transports.shard_stream import Relay, ShardStream
from tests.lib.rollout.server.weights.shard_senders import (
    MIB,
    Sender,
    make_version,
    receiver,
    same_files,
)

STREAMS = 3


@dataclass
class CountingSender(Sender):
    """Notes the connections of its streams, which begin together."""

    peers: set[str] = field(default_factory=set)
    together: asyncio.Barrier = field(default_factory=lambda: asyncio.Barrier(STREAMS))

    async def FetchShards(  # type: ignore[override]
        self, request: pb.FetchShardsRequest, context: Any
    ) -> AsyncIterator[bytes]:
        """The file asked for."""
        self.peers.add(context.peer())
        await self.together.wait()
        async for message in super().FetchShards(request, context):
            yield message


@pytest.mark.parametrize("transport", [ShardStream, Relay])
@pytest.mark.parametrize("connections", [None, 2, STREAMS])
async def test_streams_are_spread_over_the_connections(
    tmp_path: Path, connections: int | None, transport: type[ShardStream | Relay]
) -> None:
    """The sender sees as many as are set, one by default, and all bytes arrive."""
    random = np.random.default_rng(0)
    files: dict[str, Any] = {
        f"model-{number}": random.bytes(2 * MIB + number) for number in range(STREAMS)
    }
    version = make_version(tmp_path / "published", **files)
    sender = CountingSender({1: version})
    given = {} if connections is None else {"weight_connections": connections}
    async with receiver(sender, tmp_path / "to", weight_streams=STREAMS, **given) as to:
        await transport(to.context).fetch(to.incoming(version))
    assert same_files(version, to.folder)
    assert len(sender.peers) == (connections or 1)


def test_connections_without_streams_are_refused() -> None:
    """Names both settings and the cure; as many connections as streams are taken."""
    with pytest.raises(ValueError, match=r"weight_connections is 3, weight_streams 2: .*raise"):
        RolloutServerConfig(weight_connections=3)
    assert RolloutServerConfig(weight_connections=3, weight_streams=3)
