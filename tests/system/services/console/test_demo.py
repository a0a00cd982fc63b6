"""The recorded run, shown by the command as users start it: every screen has its data."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from seamflow.errors import UnavailableError
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub

from services.console.sources.private_store import private_store
from services.console.sources.shown_runs import demo_run
from services.lib import redis_binary

_LINK = re.compile(r"console: (http://127\.0\.0\.1:\d+)/\?token=(\S+)")


@asynccontextmanager
async def console(*arguments: str, folder: Path) -> AsyncIterator[tuple[str, str]]:
    """`seamflow console`; yields its URL and token, and expects a clean end after SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "seamflow.cli.main", "console", *arguments),
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            if match := _LINK.match(line.decode()):
                yield match[1], match[2]
                break
    finally:
        process.terminate()
        assert await process.wait() == 0


async def test_the_demo_has_everything(tmp_path: Path) -> None:
    """Of a real run: curves, steps with advantages, text, tokens as trained, lent nodes."""
    async with console("--demo", folder=tmp_path) as (url, token), aiohttp.ClientSession() as http:

        async def get(path: str) -> Any:
            headers = {"Authorization": f"Bearer {token}"}
            async with http.get(f"{url}/api/{path}", headers=headers) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        (run,) = (await get("runs"))["runs"]
        own = f"runs/{run['id']}"
        assert (run["state"], run["live"]) == ("finished", False)
        curves = await get(f"{own}/steps?names=reward_mean")
        assert len(curves["steps"]) == run["step"] > 10
        step = await get(f"{own}/steps/{run['step']}")
        assert step["recorded"] is True
        trained = [g for g in step["groups"] if g["state"] == "trained"]
        row = trained[0]["samples"][0]
        assert row["advantage"] is not None and row["ratio"] is not None
        whole = await get(f"{own}/rollouts/{quote(row['rollout_id'], safe='')}")
        turns = whole["turns"]
        assert all(turn["parts"] for turn in turns)
        turn = turns[-1]["turn_id"]
        tokens = await get(f"{own}/rollouts/{quote(row['rollout_id'], safe='')}/tokens?turn={turn}")
        places = [i for i, was in enumerate(tokens["trained"]) if was]
        assert places and all(tokens["advantage"][i] is not None for i in places)
        assert all(tokens["origin"][i] == "p" for i in places)
        nodes = (await get(f"{own}/nodes"))["nodes"]
        assert all(node["arrivals"] for node in nodes)
        activities = {s["activity"] for n in nodes for s in n["spans"]}
        assert {"rollout", "training", "lent"} <= activities
    assert not list(tmp_path.glob("seamflow-*")), "what it unpacked and copied is deleted"


async def test_without_a_run_it_says_what_to_do(tmp_path: Path) -> None:
    """In a folder where nothing was trained."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "seamflow.cli.main", "console", "runs/none"),
        cwd=tmp_path,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 78
    assert b"runs/none" in said and b"--demo" in said


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_a_terminal_shows_the_link_and_no_logs(tmp_path: Path, is_terminal: bool) -> None:
    """Control: elsewhere the same console writes logs."""
    reader, writer = os.openpty() if is_terminal else os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "seamflow.cli.main", "console", "--demo"),
        cwd=tmp_path,
        stdout=writer,
    )
    os.close(writer)
    said = b""
    while _LINK.search(said.decode()) is None or not (is_terminal or b'"ready"' in said):
        said += await asyncio.to_thread(os.read, reader, 4096)
    process.terminate()
    assert await process.wait() == 0
    with suppress(OSError):  # as a terminal whose other end is closed
        while part := os.read(reader, 4096):
            said += part
    os.close(reader)
    assert (len(said.splitlines()) == 1) is is_terminal, said


@pytest.fixture
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files whose path fills a socket's path nearly alone."""
    folder = tmp_path / ("t" * max(95 - len(str(tmp_path)), 1))
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


async def test_the_folder_of_a_finished_run_stays_as_it_is(long_folder: Path) -> None:
    """What is stored is served from a copy, also where a service writes to its store."""
    with demo_run() as run:
        assert run.folder is not None
        before = contents(run.folder)
        async with private_store(run.folder, run.run_id) as endpoints:
            runs = async_stub(RunServiceStub, endpoints.to("trajectory_manager"))
            await runs.EndRun(run_pb.EndRunRequest(run_id=run.run_id))
            await runs.DeleteRun(run_pb.DeleteRunRequest(run_id=run.run_id))
        assert contents(run.folder) == before
        async with private_store(run.folder, run.run_id) as endpoints:
            runs = async_stub(RunServiceStub, endpoints.to("trajectory_manager"))
            assert (await runs.GetRun(run_pb.GetRunRequest(run_id=run.run_id))).run.committed_step


async def test_a_socket_in_a_long_folder_is_none(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without a place of its own for it, the store does not start."""
    monkeypatch.setattr(redis_binary, "_MAX_FOLDER", 1000)
    with demo_run() as run:
        assert run.folder is not None
        with pytest.raises(UnavailableError, match="redis does not start"):
            async with private_store(run.folder, run.run_id):
                pass


def contents(folder: Path) -> dict[str, str]:
    """Digest of each file."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
