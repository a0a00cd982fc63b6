"""For every test: its tier as a marker, a private Redis server, one thread, no limit of time.

The tier is the folder below `tests/`; a unit test that starts a process fails (`tier_guard`). A
test that is `long` names the file which has its short form.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import rollout.gateway.limits
import trajectory_manager.limits
from tests.lib.redis_cluster import RedisCluster
from tests.lib.redis_server import RedisServer
from tests.lib.tier_guard import guarded

TESTS = Path(__file__).parent

# Before torch is imported: on models as small as these, threads wait for each other and for the
# other worker's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test asserts a time, so an example on a busy machine may take what it takes.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


# Services in this process look as often as tests are short.
trajectory_manager.limits.SWEEP_SECONDS = 0.05
rollout.gateway.limits.POLL_SECONDS = 0.02


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier, so that `-m unit` selects by folder."""
    for item in items:
        item.add_marker(getattr(pytest.mark, tier(item)))
        check_short_form(item)


def tier(item: pytest.Item) -> str:
    """The folder of a test below `tests/`."""
    return item.path.relative_to(TESTS).parts[0]


def check_short_form(item: pytest.Item) -> None:
    """Refuse a test that is `long` and does not name a file of tests with its short form."""
    for marker in item.iter_markers("long"):
        short = marker.kwargs.get("short", "")
        if not short or not (TESTS.parent / short).is_file():
            raise pytest.UsageError(
                f"{item.nodeid}: long(short={short!r}): name the test file with its short form"
            )


def _guard(item: pytest.Item) -> AbstractContextManager[None]:
    return guarded() if tier(item) == "unit" else nullcontext()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """The fixtures of a unit test start nothing either."""
    with _guard(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """A unit test fails where it starts a process or connects."""
    with _guard(item):
        return (yield)


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
