"""What a release stores, the one before and the one after can read.

A reader ignores fields that it does not know, and fields added since 0.2.0 have defaults.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from seamflow.processes import procfs
from seamflow.weights.v1.weight_service_pb2 import Manifest, WeightFile

from services.chassis.redis.connect import connect
from services.node_agent.process_journal import ProcessJournal
from services.weights import keys
from services.weights.keys import Publish, Scope
from services.weights.redis_store import RedisStore
from tests.unit.suites.mixed.test_neighbouring_records import NEW

_UNKNOWN_FIELD = b"\xfa\x7f\x01x"
"""Field 2047 of a message, the text "x"."""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


async def test_journal_of_the_node_agent(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """processes.json: the orphans of a newer agent are ended by an older one."""
    process = procfs.read(sleeper.pid)
    assert process is not None
    members = [[*process.identity, "more"]]
    content = {"critic": {"epoch": 7, "members": members, **NEW}}
    (tmp_path / "processes.json").write_text(json.dumps(content))
    async with ProcessJournal(tmp_path):
        assert sleeper.wait() == -9


async def test_manifests_and_allocations_of_the_weights_service(redis_url: str) -> None:
    """In Redis."""
    redis, scope = connect(redis_url), Scope(run_id=uuid.uuid4().hex, model="policy")
    store = RedisStore(redis)
    version = await store.begin(scope, Publish(key="a", step=4, parent=3, epoch=1), 0)
    manifest = Manifest(run_id=scope.run_id, weight_version=version, files=[WeightFile(name="f")])
    await store.commit(scope, 1, manifest)
    record = manifest.SerializeToString() + _UNKNOWN_FIELD
    await redis.hset(keys.manifests(scope), str(version), record)
    await redis.hset(keys.allocations(scope), str(version), "4:3:more")
    found = await store.manifest(scope, version)
    assert found is not None
    assert [file.name for file in found.files] == ["f"]
    allocation = await store.allocation(scope, version)
    assert allocation is not None
    assert (allocation.step, allocation.parent) == (4, 3)
    await store.close()
