"""A child process ends with all it has started, in every way it can end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from services.lib.child_process import Child

ROOT = Path(__file__).parents[4]
FAMILY = """
import os, signal, subprocess, sys
{before}
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
{after}
"""


async def start(folder: Path, before: str = "", after: str = "child.wait()") -> tuple[Child, int]:
    """A child that has a child; gives the latter's process id too."""
    code = FAMILY.format(before=before, after=after)
    child = await Child.start((sys.executable, "-c", code), dict(os.environ), folder / "log")
    while not (text := (folder / "log").read_text()):
        await asyncio.sleep(0.02)
    return child, int(text)


async def until_gone(pid: int) -> None:
    """Wait for the end of a process that is reaped elsewhere."""
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and ") Z " not in stat.read_text():
        await asyncio.sleep(0.02)


async def test_sigterm_ends_a_child_that_handles_it(tmp_path: Path) -> None:
    """It ends by the signal, and its own child with it."""
    child, grandchild = await start(tmp_path)
    assert child.is_running
    await child.end(60.0)
    assert (child.is_running, await child.wait()) == (False, -15)
    await until_gone(grandchild)


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """The time it has is the caller's."""
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child, grandchild = await start(tmp_path, before=deaf)
    await child.end(0.05)
    assert await child.wait() == -9
    await until_gone(grandchild)


async def test_the_rest_of_its_process_group_is_killed(tmp_path: Path) -> None:
    """When a process exits, its children are killed."""
    child, grandchild = await start(tmp_path, after="sys.exit(3)")
    assert await child.wait() == 3
    await until_gone(grandchild)
    child.kill()  # of one that has ended: nothing, for its id may be another's by now


async def test_a_missing_program_ends_with_an_exit_code(tmp_path: Path) -> None:
    """Its log names the program."""
    child = await Child.start(("no-such-program",), {"PATH": os.defpath}, tmp_path / "log")
    assert await child.wait() == 127
    assert "no-such-program" in (tmp_path / "log").read_text()


PARENT = """
import asyncio, os, sys
from pathlib import Path
from services.lib.child_process import Child

async def main():
    code, log, death_signal = sys.argv[1:]
    command = (sys.executable, "-c", code)
    child = await Child.start(command, dict(os.environ), Path(log), death_signal=death_signal)
    await child.wait()

asyncio.run(main())
"""
DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
print(os.getpid(), flush=True)
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize("death_signal", ["KILL", "TERM"])
async def test_a_child_that_answers_no_signal_ends_with_its_killed_parent(
    tmp_path: Path, death_signal: str
) -> None:
    """As one that loads a model; *control*: SIGTERM reaches it and does not end it."""
    log, paths = tmp_path / "log", os.pathsep.join((str(ROOT), str(ROOT / "sdk")))
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, DEAF, str(log), death_signal),
        env={**os.environ, "PYTHONPATH": paths},
    )
    while not log.exists() or not (text := log.read_text()):
        await asyncio.sleep(0.02)
    parent.kill()
    await parent.wait()
    if death_signal == "TERM":
        while "no" not in log.read_text():
            await asyncio.sleep(0.02)
        os.kill(int(text), signal.SIGKILL)
    await until_gone(int(text))
    assert ("no" in log.read_text()) == (death_signal == "TERM")
