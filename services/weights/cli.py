"""Wires the weights process together: `python -m services.weights`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from seamflow.network.keepalive import WEIGHTS_KEEPALIVE
from seamflow.weights.v1.weight_service_pb2_grpc import add_WeightServiceServicer_to_server

from services.chassis.errors import DependencyUnavailable
from services.chassis.redis.connect import connect
from services.chassis.rpc.server import Service, run
from services.weights.config import WeightsConfig
from services.weights.redis_store import RedisStore
from services.weights.servicer import WeightServicer
from services.weights.version_feed import VersionFeed
from services.weights.version_folders import WeightFolders

_POLL_SECONDS = 0.2
"""Delay with which a watcher learns of a version that another replica committed."""


def main() -> None:
    run("weights", WeightsConfig, build)


@asynccontextmanager
async def build(config: WeightsConfig) -> AsyncIterator[Service]:
    """Open the store and assemble the service."""
    store = await _open_store(config)
    try:
        yield service(config, store)
    finally:
        await store.close()


def service(config: WeightsConfig, store: RedisStore) -> Service:
    feed = VersionFeed(store, _POLL_SECONDS)
    servicer = WeightServicer(
        store=store,
        folders=WeightFolders(config.folder),
        feed=feed,
        keep_versions=config.keep_versions,
        offer_folder=config.offer_folder,
        clock=time.time,
    )
    return Service(
        servicers=[(add_WeightServiceServicer_to_server, servicer)],
        background=[feed.poll],
        ready=store.reachable,
        drain=feed.close,
        keepalive=WEIGHTS_KEEPALIVE,
    )


async def _open_store(config: WeightsConfig) -> RedisStore:
    store = RedisStore(connect(config.redis_url.get_secret_value))
    if not await store.reachable():
        await store.close()
        cure = "start it, or correct redis_url in [weights]"
        raise DependencyUnavailable("redis", f"Redis does not answer; {cure}")
    return store
