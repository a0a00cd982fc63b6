"""A child process ends with all it has started, in every way it can end."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from services.lib.child_process import Child

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
    """Wait for the end of a process, whoever takes notice of it."""
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and ") Z " not in stat.read_text():
        await asyncio.sleep(0.02)


async def test_sigterm_is_enough_for_one_that_listens(tmp_path: Path) -> None:
    """It ends by the signal, and its own child with it."""
    child, grandchild = await start(tmp_path)
    assert child.is_running
    await child.end(60.0)
    assert (child.is_running, await child.wait()) == (False, -15)
    await until_gone(grandchild)


async def test_one_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    """The time it has is the caller's."""
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child, grandchild = await start(tmp_path, before=deaf)
    await child.end(0.05)
    assert await child.wait() == -9
    await until_gone(grandchild)


async def test_what_it_leaves_in_its_group_is_killed(tmp_path: Path) -> None:
    """A process that ends by itself takes its children along."""
    child, grandchild = await start(tmp_path, after="sys.exit(3)")
    assert await child.wait() == 3
    await until_gone(grandchild)
    child.kill()  # of one that has ended: nothing, for its id may be another's by now


async def test_a_program_that_is_not_there_ends_with_a_code(tmp_path: Path) -> None:
    """Its log says what is missing."""
    child = await Child.start(("no-such-program",), {"PATH": os.defpath}, tmp_path / "log")
    assert await child.wait() == 127
    assert "no-such-program" in (tmp_path / "log").read_text()
