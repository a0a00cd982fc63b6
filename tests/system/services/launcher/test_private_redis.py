"""Another user of the machine gets nothing from the Redis of a run, nor from its folder."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError

from services.launcher.child_process import ProcessPlan
from services.launcher.cli import make_layout
from services.launcher.redis_server import private_url, server_plan, wait_for_store
from services.launcher.supervisor import Supervisor
from tests.lib.launcher.support import make_config
from tests.lib.redis_server import free_port


@pytest.mark.parametrize("has_password", [True, False])
async def test_only_the_run_is_let_in(tmp_path: Path, has_password: bool) -> None:
    """No command works without the password; control: without one, each does."""
    port = free_port()
    open_url = f"redis://127.0.0.1:{port}"
    url = private_url(tmp_path, port) if has_password else open_url
    (tmp_path / "redis").mkdir()
    plan = server_plan(make_config(), tmp_path, port)
    assert not has_password or url.partition("@")[0].removeprefix("redis://:") not in str(plan)
    async with Supervisor(tmp_path) as processes, Redis.from_url(open_url) as other:
        await processes.start(plan)
        await wait_for_store(url)
        calls = (other.get("a"), other.set("a", 1), other.flushall(), other.eval("return 1", 0))
        for call in calls:
            if not has_password:
                await call
                continue
            with pytest.raises(AuthenticationError):
                await call
        files = [each for each in (tmp_path / "redis").rglob("*") if each.is_file()]
        assert files  # the append-only ones
        for file in (*files, tmp_path / "redis.log"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_other_processes_keep_the_umask(tmp_path: Path) -> None:
    """Agents write what they like for whom they like; their log is the user's alone."""
    before = os.umask(0o022)
    try:
        async with Supervisor(tmp_path) as processes:
            command = (sys.executable, "-c", f"open({str(tmp_path / 'made')!r}, 'w')")
            await processes.start(ProcessPlan(name="agent", command=command))
            async with asyncio.timeout(60):
                await processes.finished("agent")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "agent.log").stat().st_mode) == 0o600


def test_a_run_folder_is_the_users_alone(tmp_path: Path) -> None:
    """The password, too, which a resumed run keeps."""
    config = make_config(runs_folder=str(tmp_path / "runs"))
    layout = make_layout(config, tmp_path / "run.toml")
    assert stat.S_IMODE(layout.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((layout.folder / "redis.conf").stat().st_mode) == 0o600
    port = layout.ports["redis"]
    assert private_url(layout.folder, port) == layout.redis_url
    assert layout.redis_url not in repr(layout)
