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
