"""The weights process as an operator meets it: killed, misconfigured, without its Redis."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import grpc.aio
import pytest

from services.chassis.config import load as chassis_config
from services.chassis.errors import ConfigError
from services.weights.config import WeightsConfig
from tests.lib.weights.support import FILES, describe, write
from tests.system.services.weights.process import START_SECONDS, launch, running


async def test_a_kill_between_begin_and_commit_loses_nothing(
    tmp_path: Path, redis_url: str
) -> None:
    """After SIGKILL the same key gets the same version, it can be committed, and none is reused."""
    async with running(tmp_path, redis_url) as service:
        trainer = service.trainer
        assert await trainer.publish(1) == 1
        begun = await trainer.begin(2)
        write(await trainer.folder(begun.weight_version))
        service.kill()
    async with running(tmp_path, redis_url) as service:
        trainer = service.trainer
        assert await trainer.newest() == 1
        assert await trainer.begin(2) == begun
        await trainer.commit(begun.weight_version)
        assert await trainer.newest() == 2
        assert (await trainer.begin(3)).weight_version == 3
        assert await trainer.fetch(1) == await trainer.fetch(2) == FILES


async def test_a_kill_within_an_upload_loses_none_of_it(tmp_path: Path, redis_url: str) -> None:
    """After SIGKILL in the middle of a stream the upload goes on where it was."""
    data = os.urandom(40 << 20)
    files = {"model.safetensors": data}
    async with running(tmp_path, redis_url) as service:
        trainer = service.trainer
        version = (await trainer.begin(1)).weight_version
        call = trainer.stub.UploadShards(timeout=30)
        with pytest.raises(grpc.aio.AioRpcError):
            for part in trainer.parts(version, files):
                await call.write(part)
                if part.offset == 20 << 20:
                    while not await trainer.uploaded(version, files):
                        await asyncio.sleep(0.01)
                    service.kill()
            await call
    async with running(tmp_path, redis_url) as service:
        trainer = service.trainer
        held = (await trainer.uploaded(version, files))["model.safetensors"]
        assert 0 < held < len(data)
        rest = [
            part for part in trainer.parts(version, files) if part.offset + len(part.data) > held
        ]
        assert sum(len(part.data) for part in rest) < len(data)
        await trainer.upload(rest)
        await trainer.commit(version, describe(files))
        assert await trainer.fetch(version) == files


async def test_without_redis_it_exits_69(tmp_path: Path) -> None:
    """A store that does not answer at start is named, with the unavailable exit code."""
    process = await launch(
        *("--folder", str(tmp_path), "--redis-url", "redis://127.0.0.1:1/0"),
        port_file=tmp_path / "port.json",
    )
    _, stderr = await asyncio.wait_for(process.communicate(), START_SECONDS)
    assert process.returncode == 69
    assert b"redis_url" in stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), "folder"),
        (("--redis-url", "r", "--folder", "f", "--keep-versions", "0"), "keep_versions"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(flags: tuple[str, ...], named: str) -> None:
    """Missing folder and values out of range name their field."""
    with pytest.raises(ConfigError, match=named):
        chassis_config.load(WeightsConfig, "weights", flags)
