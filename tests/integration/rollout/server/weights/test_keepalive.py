"""A link with full queues holds pings up together with the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from seamflow.channel import connect
from seamflow.errors import UnavailableError
from seamflow.network.keepalive import KEEPALIVE, WEIGHTS_KEEPALIVE, Keepalive

from rollout.server.cli import build as rollout_server
from rollout.server.config import RolloutServerConfig
from rollout.server.weights.transports.shard_stream import ShardReceiver
from services.chassis.config.settings import ServerConfig
from services.chassis.rpc import clients
from services.chassis.rpc.clients import channel
from services.weights.config import WeightsConfig
from tests.chaos.proxy import Proxy
from tests.lib.rollout.server.weights.shard_senders import (
    MIB,
    Sender,
    make_version,
    receiver,
    same_files,
)
from tests.lib.trainer.support import trainer_config
from tests.lib.weights.support import in_memory
from trainer.cli import connect_services

PAUSE_SECONDS = 1.5
"""Of a link, three times the usual patience below."""
LATEST_SECONDS = 30.0
"""Until a connection without patience must have broken, however busy this machine is."""


def _quick(keepalive: Keepalive) -> Keepalive:
    """The usual patience soon over, and a ping under way when the pause begins; that of weights
    outlives the pause on any machine."""
    patience = LATEST_SECONDS if keepalive is WEIGHTS_KEEPALIVE else PAUSE_SECONDS / 3
    return Keepalive(ping_seconds=0.2, pong_seconds=patience, silence_seconds=patience)


async def _first(
    fetching: asyncio.Task[None], event: Coroutine[Any, Any, Any], timeout: float | None = None
) -> None:
    """Wait until the transfer ends, or for the event, or until the time is up."""
    waiting = asyncio.create_task(event)
    await asyncio.wait([fetching, waiting], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


@pytest.mark.parametrize(
    ("client", "server"),
    [
        (WEIGHTS_KEEPALIVE, WEIGHTS_KEEPALIVE),
        (KEEPALIVE, WEIGHTS_KEEPALIVE),
        (WEIGHTS_KEEPALIVE, KEEPALIVE),
    ],
)
async def test_weights_survive_a_link_that_holds_everything_up(
    tmp_path: Path, client: Keepalive, server: Keepalive
) -> None:
    """With the usual patience on either side the same pause breaks the connection."""
    survives = client is server is WEIGHTS_KEEPALIVE
    version = make_version(tmp_path / "published", big=bytes(32 * MIB))
    sender = Sender({1: version})
    async with (
        sender.serving(_quick(server)) as port,
        Proxy(port).serving() as proxy,
        channel(ServerConfig(), f"127.0.0.1:{proxy.port}", _quick(client)) as link,
        receiver(sender, tmp_path / "to") as to,
    ):
        incoming, file = to.incoming(version), version.manifest.files[0]
        proxy.hold(after_bytes=4 * MIB)
        fetching = asyncio.create_task(ShardReceiver("test").receive(link, incoming, file))
        await _first(fetching, proxy.holds.wait())
        limit = PAUSE_SECONDS if survives else LATEST_SECONDS
        await _first(fetching, sender.ended.wait(), timeout=limit)
        proxy.release()
        with nullcontext() if survives else pytest.raises(UnavailableError):
            await fetching
    assert (to.folder / file.name).exists() is survives
    assert not survives or same_files(version, to.folder)


@pytest.mark.parametrize("relays", [True, False])
async def test_all_that_carries_weights_is_patient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relays: bool
) -> None:
    """Weights service, relays, and the channels of rollout servers and trainer; nothing else."""
    opened: list[tuple[str, Keepalive]] = []

    def noted(target: str, *args: Any, keepalive: Keepalive, **kwargs: Any) -> grpc.aio.Channel:
        opened.append((target, keepalive))
        return connect(target, *args, keepalive=keepalive, **kwargs)

    monkeypatch.setattr(clients, "connect", noted)
    assert in_memory(WeightsConfig(folder=tmp_path, redis_url="redis://oracle")).keepalive is (
        WEIGHTS_KEEPALIVE
    )
    weights, others = "127.0.0.1:1", "127.0.0.1:2"
    settings: dict[str, Any] = {"weight_relay_address": "127.0.0.1:3"} if relays else {}
    config = RolloutServerConfig(engine="fake", weights=weights, **settings)
    async with rollout_server(config) as service, AsyncExitStack() as stack:
        assert service.keepalive is (WEIGHTS_KEEPALIVE if relays else KEEPALIVE)
        folders = {"model": tmp_path, "checkpoint__folder": tmp_path}
        addresses = {"weights": weights, "trajectory_manager": others, "scheduler": None}
        await connect_services(trainer_config(run_id="run", **folders, **addresses), stack)
    assert set(opened) == {(weights, WEIGHTS_KEEPALIVE), (others, KEEPALIVE)}
