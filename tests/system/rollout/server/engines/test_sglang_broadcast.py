"""Broadcast into an engine that does not see our disk: another process plays its side."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import PauseMode, WeightsError
from rollout.server.engines.sglang import sent_tensors
from rollout.server.engines.sglang.http_client import Connection
from rollout.server.engines.sglang.sent_tensors import Post, SGLangBroadcast
from rollout.server.engines.sglang.sglang_engine import SGLangEngine
from tests.lib.rollout.server.engines.sglang_stub import StubSGLang
from tests.lib.rollout.server.sglang_server import sglang_config, sglang_server
from tests.lib.rollout.server.support import save_model
from tests.lib.sglang.checksums import published_checksums


class RefusedError(RuntimeError):
    """The engine rejected a call."""


@asynccontextmanager
async def played_engine(*arguments: str) -> AsyncIterator[Post]:
    """A process that answers as SGLang does; gives a function that posts to it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.system.rollout.server.engines.played_sglang", *arguments),
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), "GLOO_SOCKET_IFNAME": "lo"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    lock = asyncio.Lock()

    async def post(path: str, body: dict[str, Any]) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        async with lock:
            process.stdin.write(json.dumps([path, body]).encode() + b"\n")
            (answer,) = json.loads(await process.stdout.readline())
        if answer == "refused":
            raise RefusedError(path)
        return answer

    try:
        yield post
    finally:
        process.kill()
        await process.wait()


def save(folder: Path, seed: int) -> dict[str, str]:
    """Two files with tensors of several types; SHA-256 of each tensor."""
    folder.mkdir()
    torch.manual_seed(seed)
    tensors = {
        "embed.weight": torch.randn(64, 32),
        "layers.0.weight": torch.randn(32, 32).to(torch.bfloat16),
        "layers.0.bias": torch.randn(32),
    }
    save_file({"embed.weight": tensors["embed.weight"]}, folder / "model-1.safetensors")
    save_file({n: t for n, t in tensors.items() if n[0] == "l"}, folder / "model-2.safetensors")
    return {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


async def test_every_tensor_arrives_under_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads in a row, in several parts each; nothing of a group is left behind."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(sent_tensors, "PART_BYTES", 3000)
    async with played_engine() as post:
        for version in (1, 2):
            digests = save(tmp_path / str(version), seed=version)
            loader = SGLangBroadcast(post=post, host="127.0.0.1", seconds=60)
            await loader.load(tmp_path / str(version), f"v{version}", flush=True)
            state = await post("/received", {})
            assert state == {"received": digests, "label": f"v{version}", "groups": 0}


async def test_an_engine_that_refuses_is_not_waited_for(tmp_path: Path) -> None:
    """Its error comes at once, as one of the weights, long before the group's deadline."""
    save(tmp_path / "1", seed=1)
    async with played_engine("refuse") as post:
        loader = SGLangBroadcast(post=post, host="127.0.0.1", seconds=30)
        with pytest.raises(WeightsError, match="init_weights_update_group"):
            await loader.load(tmp_path / "1", "v1", flush=True)


class BroadcastStub(StubSGLang):
    """Takes weights as the played engine does, but rejects the scripted parts."""

    def __init__(self, played: Post) -> None:
        super().__init__()
        self.played = played
        self.refused_parts: set[int] = set()
        """Their numbers since the start."""
        self.parts = 0

    async def control(self, request: web.Request) -> web.Response:
        """As the stub does, and for a broadcast what the played engine does."""
        if request.path == "/update_weights_from_distributed":
            self.parts += 1
            if self.parts in self.refused_parts:
                return web.json_response({"message": "out of memory"}, status=400)
        if "_weight" in request.path:
            await self.played(request.path, await request.json())
        return await super().control(request)


async def test_old_weights_come_back_where_a_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine holds a part of the new version: it gets the whole old one, and serves on."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(sent_tensors, "PART_BYTES", 30_000)
    folders = [save_model(tmp_path / str(seed), seed=seed) for seed in range(2)]
    async with played_engine() as played:
        stub = BroadcastStub(played)
        async with stub.serving() as url:
            engine = SGLangEngine(
                RolloutServerConfig(
                    model=folders[0], sglang_url=url, sglang_broadcast_host="127.0.0.1"
                )
            )
            await engine.start()
            before = await played("/received", {})
            await engine.pause(PauseMode.RETRACT)
            assert stub.parts > 1
            stub.refused_parts = {stub.parts + 2}
            with pytest.raises(WeightsError, match="refused /update_weights_from_distributed"):
                await engine.update_weights(folders[1], 1)
            assert await played("/received", {}) == before
            assert engine.weight_version == 0
            await engine.update_weights(folders[1], 1)
            assert await played("/received", {}) != before
            await engine.close()


@pytest.mark.sglang
@pytest.mark.timeout(600)
async def test_a_real_sglang_holds_what_was_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine at a URL gets each version from us; its own checksums are the folder's."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folders = [save_model(tmp_path / str(seed), seed=seed) for seed in range(3)]
    with sglang_server(sglang_config(folders[0])) as url:
        engine = SGLangEngine(
            RolloutServerConfig(model=folders[0], sglang_url=url, sglang_broadcast_host="127.0.0.1")
        )
        await engine.start()
        connection = Connection(url, control_seconds=30.0)
        try:
            await engine.pause(PauseMode.RETRACT)
            for version in (1, 2):
                await engine.update_weights(folders[version], version)
                answer = await connection.post("/weights_checker", {"action": "checksum"})
                (rank,) = answer["ranks"]
                assert rank["checksums"] == published_checksums(folders[version])
        finally:
            await connection.close()
            await engine.close()
