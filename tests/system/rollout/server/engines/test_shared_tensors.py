"""Weights into an SGLang on the same host, through shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import torch
from prometheus_client import REGISTRY
from safetensors.torch import load_file

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import EngineFailed, PauseMode
from rollout.server.engines.sglang import sent_tensors
from rollout.server.engines.sglang.http_client import Connection
from rollout.server.engines.sglang.sglang_engine import SGLangEngine
from tests.lib.rollout.server.engines.sglang_stub import StubSGLang
from tests.lib.rollout.server.sglang_server import sglang_config, sglang_server
from tests.lib.rollout.server.support import save_model
from tests.lib.sglang.checksums import published_checksums

READER = """
import base64, pickle, sys
import torch
from safetensors.torch import save_file
tensors = {}
for line in sys.stdin:
    tensors |= {name: t.clone() for name, t in pickle.loads(base64.b64decode(line))}
save_file(tensors, sys.argv[1])
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three versions of one model, of several parts each."""
    monkeypatch.setattr(sent_tensors, "PART_BYTES", 30_000)
    return [save_model(tmp_path / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture
async def stub() -> StubSGLang:
    """A server that is not serving yet."""
    return StubSGLang()


@pytest.fixture
async def engine(stub: StubSGLang, folders: list[Path]) -> AsyncIterator[SGLangEngine]:
    """The adapter, paused, connected to the stub."""
    async with stub.serving() as url:
        engine = SGLangEngine(
            RolloutServerConfig(model=folders[0], sglang_url=url, sglang_weights="tensors")
        )
        await engine.start()
        await engine.pause(PauseMode.RETRACT)
        for noted in (stub.calls, stub.loaded, stub.handles):
            noted.clear()
        yield engine
        await engine.close()


def degraded() -> float:
    """Versions that were read from disk instead."""
    name = "seamflow_rollout_server_weight_tensors_degraded_total"
    return REGISTRY.get_sample_value(name) or 0.0


async def test_another_process_reads_every_tensor(
    engine: SGLangEngine, stub: StubSGLang, folders: list[Path], tmp_path: Path
) -> None:
    """In parts, within one session; no file is named to the server."""
    read: list[bytes] = []

    class Handles(list[str]):
        def __iadd__(self, more: list[str]) -> Handles:  # type: ignore[override,misc]
            target = tmp_path / f"read-{len(read)}.safetensors"
            command = [sys.executable, "-c", READER, str(target)]
            subprocess.run(command, input="\n".join(more).encode(), check=True, timeout=60)
            read.append(target.read_bytes())
            return self

    stub.handles = Handles()
    await engine.update_weights(folders[1], 1)
    assert len(read) > 1
    arrived: dict[str, torch.Tensor] = {}
    for number in range(len(read)):
        arrived |= load_file(tmp_path / f"read-{number}.safetensors")
    published = load_file(folders[1] / "model.safetensors")
    assert arrived.keys() == published.keys()
    assert all((arrived[name] == published[name]).all() for name in published)
    parts = ["update_weights_from_tensor"] * len(read)
    session = ["begin_weight_update", *parts, "end_weight_update"]
    assert [call for call in stub.calls if "weight" in call] == session


@pytest.mark.parametrize("refused", ["begin_weight_update", "update_weights_from_tensor"])
async def test_where_tensors_are_refused_the_whole_version_is_read(
    engine: SGLangEngine, stub: StubSGLang, folders: list[Path], refused: str
) -> None:
    """From disk, once; the next version is sent as tensors again."""
    before = degraded()
    stub.refuse = [refused]
    await engine.update_weights(folders[1], 1)
    assert stub.calls[-1] == "update_weights_from_disk"
    assert (engine.weight_version, degraded()) == (1, before + 1)
    stub.calls.clear()
    await engine.update_weights(folders[2], 2)
    assert "update_weights_from_disk" not in stub.calls
    assert engine.weight_version == 2


async def test_without_room_in_shared_memory_it_is_not_tried(
    engine: SGLangEngine,
    stub: StubSGLang,
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container has 64 MB by default, and writing beyond them ends the process."""
    monkeypatch.setattr(sent_tensors, "PART_BYTES", 1 << 60)
    await engine.update_weights(folders[1], 1)
    assert "begin_weight_update" not in stub.calls
    assert stub.loaded == ["1"]


async def test_a_server_that_tensors_end_reads_files_in_its_next_life(
    stub: StubSGLang, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would end again at each start."""
    async with stub.serving() as url:
        engine = SGLangEngine(
            RolloutServerConfig(model=folders[0], sglang_url=url, sglang_weights="tensors")
        )
        await engine.start()
        await engine.pause(PauseMode.RETRACT)
        stub.loaded.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "post", _disconnected)
            with pytest.raises(EngineFailed):
                await engine.update_weights(folders[1], 1)
        await engine.start()
        assert stub.loaded == ["0"]
        await engine.close()


async def _disconnected(*_: object, **__: object) -> None:
    raise aiohttp.ServerDisconnectedError


@pytest.mark.sglang
@pytest.mark.timeout(600)
async def test_a_real_sglang_holds_the_tensors(folders: list[Path]) -> None:
    """Each version arrives in parts; its own checksums are the folder's."""
    with sglang_server(sglang_config(folders[0])) as url:
        engine = SGLangEngine(
            RolloutServerConfig(model=folders[0], sglang_url=url, sglang_weights="tensors")
        )
        before = degraded()
        await engine.start()
        connection = Connection(url, control_seconds=30.0)
        try:
            await engine.pause(PauseMode.RETRACT)
            for version in (1, 2):
                await engine.update_weights(folders[version], version)
                answer = await connection.post("/weights_checker", {"action": "checksum"})
                (rank,) = answer["ranks"]
                assert rank["checksums"] == published_checksums(folders[version])
            assert degraded() == before
            assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
        finally:
            await connection.close()
            await engine.close()
