"""What an earlier life left is ended, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from seamflow.processes import procfs
from seamflow.processes.procfs import Identity

from services.chassis.errors import DependencyUnavailable
from services.node_agent.process_journal import ProcessJournal


@pytest.fixture(name="sleeper")
def _sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until it is killed."""
    with subprocess.Popen(["sleep", "600"]) as popen:
        yield popen
        popen.kill()


async def test_a_journaled_process_is_killed_by_the_next_agent(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """It is known by its id and by when it started."""
    async with ProcessJournal(tmp_path) as journal:
        journal.add("critic", sleeper.pid, epoch=7)
    async with ProcessJournal(tmp_path):
        assert sleeper.wait() == -9
    assert json.loads((tmp_path / "processes.json").read_text()) == {}


async def test_a_process_that_reuses_the_id_is_not_killed(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """Ids are reused: one with another start time is another process."""
    process = procfs.read(sleeper.pid)
    assert process is not None
    boot, ticks = process.identity.started.split("/")
    earlier = [[sleeper.pid, f"{boot}/{int(ticks) - 1}"], [sleeper.pid, f"another-boot/{ticks}"]]
    content = {"critic": {"epoch": 7, "members": earlier}}
    (tmp_path / "processes.json").write_text(json.dumps(content))
    async with ProcessJournal(tmp_path):
        assert sleeper.poll() is None
    procfs.kill(Identity(sleeper.pid, f"{boot}/{int(ticks) - 1}"))
    assert procfs.is_alive(process.identity)


async def test_a_folder_has_one_agent(tmp_path: Path) -> None:
    """A second one would kill the first one's workers."""
    async with ProcessJournal(tmp_path):
        with pytest.raises(DependencyUnavailable, match="another node agent"):
            await ProcessJournal(tmp_path).__aenter__()
    async with ProcessJournal(tmp_path):
        pass


async def test_an_empty_journal_is_valid(tmp_path: Path) -> None:
    """A machine that lost its power may leave it so."""
    (tmp_path / "processes.json").touch()
    async with ProcessJournal(tmp_path):
        pass


async def test_descendants_stay_journaled_after_their_parent_ends(
    tmp_path: Path,
) -> None:
    """Also those in a separate session; the host memory of all is summed."""
    code = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""
    async with ProcessJournal(tmp_path) as journal:
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            child = procfs.read(int(parent.stdout.readline()))
            assert child is not None
            journal.add("critic", parent.pid, epoch=7)
            num_bytes = await journal.update("critic", parent.pid)
            leader = procfs.read(parent.pid)
            assert leader is not None
            assert num_bytes > child.resident_bytes
            parent.kill()
        await journal.update("critic", parent.pid)
        members = json.loads((tmp_path / "processes.json").read_text())["critic"]["members"]
        assert members == [list(child.identity)]
        await journal.clear("critic")
        assert not procfs.is_alive(child.identity)
