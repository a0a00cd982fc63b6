"""How a version goes from the disk into the engine: prepared first, changed within a deadline."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from rollout.server.config import RolloutServerConfig
from rollout.server.engine_lifecycle import EngineLifecycle, State
from rollout.server.engines.engine import EngineFailed, PauseMode, WeightsError
from rollout.server.engines.fake import FakeEngine
from rollout.server.servicer import RolloutServerServicer
from rollout.server.weights.weight_cache import FetchedWeights
from tests.lib.rollout.server.support import collect, request


class Folder:
    """A cache whose every version is one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model.safetensors").write_bytes(b"w")

    async def fetch(self, weight_version: int | None = None) -> FetchedWeights | None:
        """The version asked for; none is the newest."""
        if weight_version is None:
            return None
        return FetchedWeights(weight_version=weight_version, folder=self.folder)

    def prune(self, loaded: int) -> None:
        """Nothing to remove."""


class Watched(FakeEngine):
    """Notes what it is asked for; its phases can be made to hang."""

    def __init__(self, *hang: str) -> None:
        super().__init__(RolloutServerConfig(fake_vocab_size=64))
        self.calls: list[str] = []
        self.hang = hang
        self.go_on = asyncio.Event()

    async def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.hang:
            await self.go_on.wait()

    async def prepare_weights(self, folder: Path) -> None:
        if self.calls[-1:] != ["update"]:  # the fake engine's update looks at the folder so
            await self._note("prepare")
        await super().prepare_weights(folder)

    async def pause(self, mode: PauseMode) -> None:
        await self._note("pause")
        await super().pause(mode)

    async def update_weights(self, folder: Path, weight_version: int) -> None:
        await self._note("update")
        await super().update_weights(folder, weight_version)

    async def resume(self) -> None:
        await self._note("resume")
        await super().resume()


async def serving(engine: FakeEngine, folder: Path, **deadlines: float) -> EngineLifecycle:
    """A server that takes turns under version 0."""
    cache: Any = Folder(folder)
    server = EngineLifecycle(engine, cache, **deadlines)  # type: ignore[arg-type]
    await server.start()
    await server.begin()
    assert server.state is State.SERVING
    return server


async def test_weights_are_in_memory_before_turns_are_stopped(tmp_path: Path) -> None:
    """Prepared while sampling continues, then pause, update, resume and nothing between."""
    engine = Watched()
    server = await serving(engine, tmp_path)
    engine.calls.clear()
    await server.follow(1)
    assert engine.calls == ["prepare", "pause", "update", "resume"]
    assert engine.weight_version == 1
    await server.follow(1)
    assert len(engine.calls) == 4
    await engine.close()


async def test_a_slow_prepare_does_not_keep_weights_back(tmp_path: Path) -> None:
    """Past its deadline the version is loaded without."""
    engine = Watched("prepare")
    server = await serving(engine, tmp_path, prepare_seconds=0.02)
    await server.follow(1)
    assert engine.weight_version == 1
    await engine.close()


async def test_an_engine_that_does_not_take_weights_is_given_up(tmp_path: Path) -> None:
    """`wait_failed` raises and its turns end: nothing is held without a limit."""
    engine = Watched("update")
    server = await serving(engine, tmp_path, swap_seconds=0.05)
    with pytest.raises(EngineFailed, match="weight_swap_seconds"):
        await server.follow(1)
    for alive in (engine.wait_failed(), collect(engine.generate(request()))):
        with pytest.raises(EngineFailed, match="weight_swap_seconds"):
            await alive
    await engine.close()


async def test_weights_that_are_wrong_do_not_end_an_engine(tmp_path: Path) -> None:
    """Control: they are refused in the change itself, and turns continue under the old ones."""
    engine = Watched()
    server = await serving(engine, tmp_path)
    shutil.rmtree(tmp_path)
    engine.calls.clear()
    with pytest.raises(WeightsError):
        await server.update(1)
    assert engine.calls == ["pause", "update", "resume"]
    assert (server.state, engine.weight_version) == (State.SERVING, 0)
    await engine.close()


async def test_a_change_outlives_its_caller(tmp_path: Path) -> None:
    """A call whose deadline passes in the middle leaves no engine paused and no lock held."""
    engine = Watched("update")
    server = await serving(engine, tmp_path)
    servicer = RolloutServerServicer(server, server_id="s1", run_id="run")
    wanted = pb.UpdateWeightsRequest(weight_version=1)
    call = asyncio.create_task(servicer.UpdateWeights(wanted, None))
    while "update" not in engine.calls:
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call})
    assert engine.calls[-1] == "update"
    engine.go_on.set()
    while engine.weight_version != 1:
        await asyncio.sleep(0)
    assert await server.update(1) == 1
    assert server.state is State.SERVING
    assert len((await collect(engine.generate(request()))).token_ids) == 32
    await engine.close()
