"""A drill: back up a live run, destroy everything, restore it, go on."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from redis.asyncio import Redis
from seamflow.trajectory.v1 import trajectory_service_pb2
from seamflow.weights.v1.weight_service_pb2 import Manifest, WeightFile

from services.chassis.rpc.server import started
from services.weights.keys import Publish, Scope
from services.weights.redis_store import RedisStore
from tests.lib.redis_server import RedisServer
from tests.lib.trajectory_manager.client import Client
from tools.backup.backup_command import main, restore
from tools.backup.save import save
from tools.backup.snapshot import BackupError, fetch_snapshot, serving
from trainer import fsync_files
from trainer.checkpoint.own_files import seal, verify
from trajectory_manager.cli import service
from trajectory_manager.config import TrajectoryManagerConfig
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis.connect import redis_store

RUN_ID = "drill"
SCOPE = Scope(run_id=RUN_ID, model="policy")


@dataclass(frozen=True, slots=True)
class State:
    """Where a run keeps its state."""

    redis: RedisServer
    checkpoints: Path
    weights: Path

    def write_checkpoint(self, step: int) -> Path:
        """A whole checkpoint, as the trainer writes it, but for its content."""
        folder = self.checkpoints / f"step_{step:09d}"
        folder.mkdir(parents=True)
        fsync_files.write_json(folder / "state.json", {"run_id": RUN_ID, "step": step})
        (folder / "rank_00000_of_00001.safetensors").write_bytes(bytes([step]) * 1000)
        seal(folder)
        return folder

    async def publish(self, step: int) -> int:
        """A committed weight version."""
        data = bytes([step]) * 500
        store = RedisStore(Redis.from_url(self.redis.url, protocol=3))
        try:
            publish = Publish(key=f"step-{step}", step=step, parent=0, epoch=1)
            version = await store.begin(SCOPE, publish, 0)
            folder = self.weights / RUN_ID / "policy" / f"weight_v{version:06d}"
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(data)
            digest = sha256(data).hexdigest()
            file = WeightFile(name="model.safetensors", num_bytes=len(data), sha256=digest)
            manifest = Manifest(run_id=RUN_ID, weight_version=version, step=step, files=[file])
            await store.commit(SCOPE, 1, manifest)
        finally:
            await store.close()
        return version

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A client of a trajectory manager on this Redis."""
        config = TrajectoryManagerConfig(
            redis_url=self.redis.url, port=0, admin_port=-1, drain_seconds=0.2
        )
        async with (
            redis_store(self.redis.url, Durability.FAST, 5.0) as store,
            started(service(config, store), config) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            yield Client(channel, RUN_ID)


@pytest.fixture
def states(tmp_path: Path) -> Iterator[tuple[State, State]]:
    """One with a running Redis, and an empty one."""
    made = []
    for name in ("old", "new"):
        folder = tmp_path / name
        redis = RedisServer(folder / "redis")
        redis.start()
        made.append(State(redis, folder / "checkpoints", folder / "weights"))
    yield made[0], made[1]
    for state in made:
        state.redis.stop()


async def play_three_steps(state: State) -> None:
    """Steps 1 and 2 committed and checkpointed; step 3 trained and checkpointed, not committed."""
    async with state.client() as client:
        await client.create_run()
        await client.submit(*(f"task-{number}" for number in range(6)))
        epoch = await client.reconcile()
        for step in (1, 2, 3):
            for value in (0.0, 1.0):
                await client.play(version=step - 1, value=value)
            assert (await client.lease_samples(epoch, step, base=step - 1)).samples
            state.write_checkpoint(step)
            await state.publish(step)
            if step < 3:
                await client.reconcile("trainer", step)


async def stored(client: Client) -> list[trajectory_service_pb2.ListTrajectoriesResponse]:
    """All trajectories with their tokens."""
    request = trajectory_service_pb2.ListTrajectoriesRequest(run_id=RUN_ID, page_size=100)
    return [(await client.trajectories.ListTrajectories(request))]


async def content(url: str) -> dict[bytes, Any]:
    """Every key with its value and when it expires."""
    async with Redis.from_url(url) as redis:
        read: dict[Any, Callable[[Any], Any]] = {
            b"string": redis.get,
            b"hash": redis.hgetall,
            b"set": redis.smembers,
            b"list": lambda key: redis.lrange(key, 0, -1),
            b"zset": lambda key: redis.zrange(key, 0, -1, withscores=True),
        }
        return {
            key: (await read[await redis.type(key)](key), await redis.pexpiretime(key))
            async for key in redis.scan_iter()
        }


async def test_a_run_goes_on_from_its_backup(states: tuple[State, State], tmp_path: Path) -> None:
    """Trajectories, ledger, checkpoint and weights are equal; nothing committed is leased again."""
    old, new = states
    await play_three_steps(old)
    async with old.client() as client:
        before = await stored(client)
    contents = await save(
        old.redis.url, tmp_path / "backup", {RUN_ID: old.checkpoints}, old.weights
    )
    assert contents.runs[RUN_ID] == {
        "committed_step": 2,
        "leased_step": 3,
        "checkpoint_step": 3,
        "weight_version": 3,
    }
    keys = await content(old.redis.url)
    destroy(old)
    await restore(tmp_path / "backup", new.redis.url, {RUN_ID: new.checkpoints}, new.weights)
    assert await content(new.redis.url) == keys
    assert (new.weights / RUN_ID / "policy/weight_v000003/model.safetensors").read_bytes()
    (checkpoint,) = new.checkpoints.iterdir()
    verify(checkpoint)
    async with new.client() as client:
        assert await stored(client) == before
        epoch = await client.reconcile("resumed", int(checkpoint.name.removeprefix("step_")))
        for value in (0.0, 1.0):
            await client.play(version=3, value=value)
        fresh = await client.lease_samples(epoch, 4, base=3)
        assert {sample.group_id for sample in fresh.samples} == {"task-3"}


def destroy(state: State) -> None:
    """As the loss of its machine."""
    state.redis.kill()
    for folder in (state.checkpoints, state.weights):
        shutil.rmtree(folder)


async def test_the_checkpoint_belongs_to_the_snapshot(
    states: tuple[State, State], tmp_path: Path
) -> None:
    """One of a step that the snapshot does not know does not, nor one before the committed."""
    old, _ = states
    await play_three_steps(old)
    shutil.rmtree(old.write_checkpoint(9).with_name("step_000000003"))
    contents = await save(old.redis.url, tmp_path / "backup", {RUN_ID: old.checkpoints}, None)
    assert contents.runs[RUN_ID]["checkpoint_step"] == 2
    shutil.rmtree(old.checkpoints / "step_000000002")
    with pytest.raises(BackupError, match="no whole checkpoint of steps 2 to 3"):
        await save(old.redis.url, tmp_path / "another", {RUN_ID: old.checkpoints}, None)
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize("name", ["redis.rdb", f"checkpoints/{RUN_ID}/step_000000003/state.json"])
async def test_a_truncated_backup_is_refused_by_name(
    states: tuple[State, State], tmp_path: Path, name: str
) -> None:
    """Negative control of the drill: nothing is written."""
    old, new = states
    await play_three_steps(old)
    await save(old.redis.url, tmp_path / "backup", {RUN_ID: old.checkpoints}, None)
    file = tmp_path / "backup" / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BackupError, match=f"{file} differs from its checksum"):
        await restore(tmp_path / "backup", new.redis.url, {RUN_ID: new.checkpoints}, None)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(BackupError, match=f"{file} differs from its checksum"):
        await restore(tmp_path / "backup", new.redis.url, {RUN_ID: new.checkpoints}, None)
    assert not new.checkpoints.exists()
    assert await content(new.redis.url) == {}


async def test_nothing_is_overwritten(states: tuple[State, State], tmp_path: Path) -> None:
    """A Redis with keys and a folder with a checkpoint are refused; so is a cluster."""
    old, new = states
    await play_three_steps(old)
    await save(old.redis.url, tmp_path / "backup", {RUN_ID: old.checkpoints}, None)
    with pytest.raises(BackupError, match=r"step_000000003/.* exists"):
        await restore(tmp_path / "backup", new.redis.url, {RUN_ID: old.checkpoints}, None)
    with pytest.raises(BackupError, match="give --checkpoints drill=FOLDER"):
        await restore(tmp_path / "backup", new.redis.url, {}, None)
    with pytest.raises(BackupError, match="keys: restore into an empty Redis"):
        await restore(tmp_path / "backup", old.redis.url, {RUN_ID: new.checkpoints}, None)
    with pytest.raises(BackupError, match="exists: name a folder"):
        await save(old.redis.url, tmp_path / "backup", {}, None)
    with pytest.raises(BackupError, match="of a cluster"):
        await save("redis+cluster://127.0.0.1:1/", tmp_path / "none", {}, None)


@pytest.mark.parametrize("diskless", ["yes", "no"])
async def test_a_snapshot_arrives_whole(tmp_path: Path, diskless: str) -> None:
    """As a stream with a mark at its end, or with its length before it; after a password."""
    redis = RedisServer(tmp_path, {"repl-diskless-sync": diskless})
    redis.start()
    url = f"redis://:secret@127.0.0.1:{redis.port}/0"
    try:
        async with Redis.from_url(redis.url) as client:
            await client.config_set("requirepass", "secret")
            values = {f"key-{number}": bytes([number % 251]) * number for number in range(2000)}
            await client.mset(values)
        await fetch_snapshot(url, tmp_path / "copy.rdb")
        with pytest.raises(BackupError, match="the server refuses: Authentication required"):
            await fetch_snapshot(redis.url, tmp_path / "refused.rdb")
    finally:
        redis.stop()
    async with serving(tmp_path / "copy.rdb", 0) as copy:
        assert await copy.dbsize() == len(values)
        assert await copy.get("key-1999") == values["key-1999"]


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and the exit code of a wrong configuration."""
    url = "redis://127.0.0.1:1/0"
    with pytest.raises(SystemExit) as ended:
        main(["restore", "--backup", str(tmp_path), "--redis-url", url])
    assert ended.value.code == 78
    assert "is not a whole backup: backup.json" in capsys.readouterr().err
