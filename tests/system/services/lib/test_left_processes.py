"""What the user's code starts ends with the process that called it, and keeps it from nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from seamflow.client.turn import Task
from seamflow.environment import EnvironmentClient, Transcript
from seamflow.errors import DeadlineError

from services.launcher.checks.user_code import run_command
from services.lib import child_process
from services.lib.child_process import Child
from tests.system.services.lib.left_process import WAYS

ROOT = Path(__file__).parents[4]
MODULE = "tests.system.services.lib.left_process"
ALL_WAYS = sorted(WAYS)


def _environment(folder: Path) -> Mapping[str, str]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "sdk")))
    return {**os.environ, "PYTHONPATH": paths, "LEFT_FILE": str(folder / "left")}


async def _left(folder: Path) -> int:
    """The id of the process that the user's code has left, once it has told it."""
    file = folder / "left"
    while not file.exists() or not file.read_text().endswith("\n"):
        await asyncio.sleep(0.02)
    return int(file.read_text().split()[-1])


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return ") Z " not in stat.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def _until_gone(pid: int) -> None:
    while _runs(pid):
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "exits"])
async def test_a_child_takes_along_what_it_left(
    tmp_path: Path, way: str, *, is_killed: bool
) -> None:
    """By its end or its death, in whatever session it is, whoever its parent is by then."""
    command = (sys.executable, "-m", MODULE, way, *(["waits"] if is_killed else []))
    child = await Child.start(command, _environment(tmp_path), tmp_path / "log")
    pid = await _left(tmp_path)
    if is_killed:
        os.kill(child.pid, signal.SIGKILL)
    elif way == "worker":
        await child.end(0.1)  # it waits for its worker
    await child.wait()
    await _until_gone(pid)


async def test_without_the_mark_a_session_of_its_own_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the process group alone does not hold it."""
    monkeypatch.setattr(child_process, "end_left", lambda mark: None)
    command = (sys.executable, "-m", MODULE, "daemon")
    child = await Child.start(command, _environment(tmp_path), tmp_path / "log")
    pid = await _left(tmp_path)
    await child.wait()
    assert _runs(pid)
    os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def _reward_server(folder: Path) -> AsyncIterator[tuple[int, EnvironmentClient]]:
    """A reward server as somebody starts it who then dies: nobody kills it, or what it left."""
    command = (sys.executable, "-m", "seamflow.environment", "--reward", f"{MODULE}:reward")
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, env=_environment(folder), stdout=log, stderr=log, start_new_session=True
        )
    try:
        while '{"port"' not in (text := (folder / "log").read_text()):
            await asyncio.sleep(0.02)
        port = json.loads(text[text.index('{"port"') :].splitlines()[0])["port"]
        async with EnvironmentClient(f"127.0.0.1:{port}") as client:
            yield process.pid, client
        os.kill(process.pid, signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:  # the test has failed
            process.kill()


async def _score(client: EnvironmentClient, way: str, seconds: float = 60.0) -> object:
    task = Task(task_id="t", payload={"way": way})
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    transcript = Transcript(rollout_id="r", task=task, messages=said)
    return (await client.score([transcript], timeout=seconds))[0]


@pytest.mark.parametrize("way", ["daemon", "fork", "pipes", "program", "worker"])
async def test_a_reward_server_ends_with_what_its_function_left(tmp_path: Path, way: str) -> None:
    """By SIGTERM, with nobody to kill it: it waits for no child, and answers until then."""
    async with _reward_server(tmp_path) as (_, client):
        assert await _score(client, way) == {"reward": 1.0}
        pid = await _left(tmp_path)
        assert await _score(client, "") == {"reward": 1.0}
        # A copy of a process with gRPC's threads may have ended by itself.
        assert _runs(pid) or way in ("fork", "worker")
    await _until_gone(pid)


async def test_a_copy_that_returns_from_its_call_ends(tmp_path: Path) -> None:
    """Or there would be two servers on one connection; the call is answered once."""
    async with _reward_server(tmp_path) as (server, client):
        assert await _score(client, "forks") == {"reward": 1.0}
        pids = {int(text) for text in (tmp_path / "left").read_text().split()} - {server}
        for pid in pids:
            await _until_gone(pid)


async def test_a_function_that_never_returns_holds_nobody(tmp_path: Path) -> None:
    """Not the next call, and not the end of the server."""
    async with _reward_server(tmp_path) as (_, client):
        with pytest.raises(DeadlineError):
            await _score(client, "never", seconds=0.3)
        assert await _score(client, "") == {"reward": 1.0}


@pytest.mark.parametrize("way", ["daemon", "pipes"])
async def test_a_check_waits_for_no_process_that_is_left(tmp_path: Path, way: str) -> None:
    """It has the output of the check, which would never end as a pipe."""
    command = (sys.executable, "-m", MODULE, way)
    done = await asyncio.to_thread(run_command, command, _environment(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    await _until_gone(await _left(tmp_path))
