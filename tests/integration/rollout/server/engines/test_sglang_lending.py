"""A device that SGLang does not free is never handed over; a restore loads one version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from seamflow.channel import connect
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import (
    add_RolloutServerServiceServicer_to_server,
)
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb

from rollout.server.config import RolloutServerConfig
from rollout.server.engine_lifecycle import EngineLifecycle, State
from rollout.server.engines.engine import MemoryNotReleased, PauseMode, WeightsError
from rollout.server.engines.sglang import server_weights
from rollout.server.engines.sglang.sglang_engine import SGLangEngine
from rollout.server.servicer import RolloutServerServicer
from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.server import Service, started
from services.node_agent.switcher import Order, Switcher
from services.node_agent.worker_clients import Role, RolloutActivity, WorkerStatus
from tests.lib.rollout.server.client import serving
from tests.lib.rollout.server.engines.sglang_stub import HELD_BYTES, OTHER_BYTES, StubSGLang
from tests.lib.rollout.server.support import collect, request, save_model
from tests.lib.rollout.server.weights.weight_service import TinyWeightService

ROLLOUT, TRAIN = Role("rollout", "run"), Role("train", "run")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of one model."""
    base = tmp_path_factory.mktemp("models")
    return save_model(base / "a", seed=1), save_model(base / "b", seed=2)


@asynccontextmanager
async def lending(stub: StubSGLang, folder: Path) -> AsyncIterator[EngineLifecycle]:
    """A rollout server whose engine lends the stub's device."""
    async with stub.serving() as url:
        engine = SGLangEngine(
            RolloutServerConfig(model=folder, sglang_url=url, lends_device=True),
            used_bytes=stub.measure,
        )
        server = EngineLifecycle(engine, None)
        try:
            await server.start()
            await server.begin()
            yield server
        finally:
            await engine.close()


class Trainer:
    """Notes what is in use on the device when it is given it."""

    def __init__(self, stub: StubSGLang) -> None:
        self._stub = stub
        self.found: list[int] = []

    async def activate(self, epoch: int) -> None:
        """Take the device."""
        self.found.append(self._stub.used_bytes)

    async def deactivate(self, epoch: int) -> None:
        """It holds nothing."""

    async def hand_over(self) -> None:
        """It has nothing."""

    async def status(self) -> WorkerStatus:
        """Off."""
        return WorkerStatus(is_off=True)


class Node:
    """A node agent's switcher between the stub and a trainer."""

    def __init__(self, stub: StubSGLang, channel: grpc.aio.Channel) -> None:
        self.trainer = Trainer(stub)
        self.switcher = Switcher(
            {ROLLOUT: RolloutActivity(channel), TRAIN: self.trainer},
            may_activate=lambda: True,
            clock=asyncio.get_running_loop().time,
            recheck_seconds=60.0,
        )
        self._epoch = 0

    def order(self, role: Role) -> None:
        """Assign a role."""
        self._epoch += 1
        self.switcher.set_order(Order(role, self._epoch))

    async def until_active(self) -> None:
        """Wait until the last order is carried out."""
        active = scheduler_pb.NODE_STATE_ACTIVE
        while (self.switcher.status.state, self.switcher.status.epoch) != (active, self._epoch):
            await asyncio.sleep(0.001)


@asynccontextmanager
async def node_with(stub: StubSGLang, server: EngineLifecycle) -> AsyncIterator[Node]:
    """The node of `server`, which rolls out."""
    servicer = RolloutServerServicer(server, server_id="s1", run_id="run")
    service = Service(servicers=[(add_RolloutServerServiceServicer_to_server, servicer)])
    async with (
        started(service, ServerConfig(drain_seconds=0.0)) as port,
        connect(f"127.0.0.1:{port}") as channel,
    ):
        node = Node(stub, channel)
        running = asyncio.create_task(node.switcher.run())
        node.order(ROLLOUT)
        await node.until_active()
        yield node
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_node_whose_memory_is_not_freed_is_never_handed_over(
    folders: tuple[Path, Path],
) -> None:
    """20 of 20 releases that free nothing are refused; the node rolls out again in between."""
    stub = StubSGLang()
    async with lending(stub, folders[0]) as server, node_with(stub, server) as node:
        stub.freed_part = 0.0
        for attempt in range(1, 21):
            node.order(TRAIN)
            while stub.calls.count("release_memory_occupation") < attempt:
                await asyncio.sleep(0.001)
            node.order(ROLLOUT)
            await node.until_active()
            assert (server.state, node.trainer.found) == (State.SERVING, [])
            assert len((await collect(server.engine.generate(request(seed=None)))).token_ids) == 32
        stub.freed_part = 1.0
        node.order(TRAIN)
        await node.until_active()
        assert (server.state, node.trainer.found) == (State.RELEASED, [OTHER_BYTES])


async def test_without_the_measurement_the_trainer_gets_an_occupied_device(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(server_weights, "check_freed", lambda held, before, after: held)
    stub = StubSGLang()
    async with lending(stub, folders[0]) as server, node_with(stub, server) as node:
        stub.freed_part = 0.0
        node.order(TRAIN)
        await node.until_active()
        assert node.trainer.found == [OTHER_BYTES + HELD_BYTES]


@pytest.mark.parametrize(
    ("part", "enough"), [(0.0, False), (0.6, False), (0.95, True), (1.0, True)]
)
async def test_too_little_is_refused_by_name(
    folders: tuple[Path, Path], part: float, enough: bool
) -> None:
    """What was freed is measured; afterwards the engine has its memory and weights again."""
    stub = StubSGLang()
    async with lending(stub, folders[0]) as server:
        stub.freed_part = part
        if enough:
            assert await server.release() == int(part * HELD_BYTES)
            assert server.state is State.RELEASED
            return
        with pytest.raises(MemoryNotReleased, match=r"of the 6\.00 GiB .* torch_memory_saver"):
            await server.release()
        assert (server.state, stub.used_bytes) == (State.PAUSED, OTHER_BYTES + HELD_BYTES)
        assert stub.loaded[-1] == "0"


async def test_a_server_without_memory_saver_is_refused_at_its_start(
    folders: tuple[Path, Path],
) -> None:
    """Where the device is to be lent; on a CPU there is nothing to free."""
    stub = StubSGLang()
    stub.memory_saver = False
    with pytest.raises(ValueError, match=r"lends_device = true.*--enable-memory-saver"):
        async with lending(stub, folders[0]):
            pass
    stub.device = "cpu"
    async with lending(stub, folders[0]) as server:
        assert await server.release() == 0
        assert server.state is State.RELEASED


async def test_a_release_without_memory_saver_is_refused(folders: tuple[Path, Path]) -> None:
    """Also where nobody said that the device is lent; SGLang is not asked."""
    stub = StubSGLang()
    stub.memory_saver = False
    async with stub.serving() as url:
        engine = SGLangEngine(RolloutServerConfig(model=folders[0], sglang_url=url))
        await engine.start()
        await engine.pause(PauseMode.ABORT)
        with pytest.raises(MemoryNotReleased, match="without its memory saver"):
            await engine.release_memory()
        await engine.close()
    assert "release_memory_occupation" not in stub.calls


async def test_a_restore_loads_the_wanted_version_once(folders: tuple[Path, Path]) -> None:
    """Of three versions committed meanwhile the newest, and not the last one first."""
    stub, weights = StubSGLang(), TinyWeightService()
    async with stub.serving() as url, weights.serving() as port:
        config = RolloutServerConfig(
            **{"engine": "sglang", "model": folders[0], "sglang_url": url, "port": 0},
            **{"run_id": "run", "weights": f"127.0.0.1:{port}", "lends_device": True},
        )
        async with serving(config) as client:
            await client.serving(0)
            await client.stub.ReleaseMemory(pb.ReleaseMemoryRequest())
            for version in (5, 6, 7):
                await weights.publish(version, folders[1])
            stub.loaded.clear()
            restored = await client.stub.RestoreMemory(pb.RestoreMemoryRequest())
            assert (restored.weight_version, stub.loaded) == (7, ["7"])
            await client.stub.ReleaseMemory(pb.ReleaseMemoryRequest())
            await client.stub.RestoreMemory(pb.RestoreMemoryRequest())
            assert stub.loaded == ["7", "7"]  # no newer one: the last again


async def test_weights_that_cannot_be_restored_leave_the_memory_released(
    folders: tuple[Path, Path],
) -> None:
    """The device is free for others, as the state says; the next restore may succeed."""
    stub = StubSGLang()
    async with lending(stub, folders[0]) as server:
        await server.release()
        stub.refuse = ["update_weights_from_disk"]
        with pytest.raises(WeightsError, match="refused"):
            await server.engine.restore_memory(folders[1], 5)
        assert (server.state, stub.used_bytes) == (State.RELEASED, OTHER_BYTES)
        await server.restore()
        assert (server.state, stub.label) == (State.SERVING, "0")


async def test_control_calls_have_the_deadline_of_their_setting(
    folders: tuple[Path, Path],
) -> None:
    """A scheduler that answers late is waited for, and then named with the setting."""
    stub = StubSGLang()
    async with stub.serving() as url:
        engine = SGLangEngine(
            RolloutServerConfig(model=folders[0], sglang_url=url, sglang_control_seconds=0.05)
        )
        await engine.start()
        stub.late_control = asyncio.Event()
        with pytest.raises(Exception, match="sglang_control_seconds"):
            await engine.pause(PauseMode.IN_PLACE)
        stub.late_control.set()
        await engine.close()
