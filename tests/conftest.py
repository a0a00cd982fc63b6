"""For every test: a private Redis server, a private cluster, one thread, no limit of time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer

# Before torch is imported: on models as small as these, threads wait for each other and for the
# other worker's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test asserts a time, so an example on a busy machine may take what it takes.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Redis server shared by the session; use a run id of your own, or flush it."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """A cluster of three nodes shared by the session; use a run id of your own."""
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running Redis server of the test's own, to kill and restart."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.stop()
