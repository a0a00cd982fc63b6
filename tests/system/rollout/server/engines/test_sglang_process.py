"""Starting SGLang: its flags, why it did not start, and that it never outlives its server."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollout.server.config import RolloutServerConfig
from rollout.server.engines import build_engine
from rollout.server.engines.sglang import process_guard, server_process
from rollout.server.engines.sglang.server_process import SGLangProcess
from tests.lib.rollout.server.support import save_model

# Starts a worker as SGLang does, says who they are, and waits for ever.
SERVER = """
import os, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(os.getpid(), worker.pid, flush=True)
time.sleep(1000)
"""


# Starts a command the way it is told, and stays.
PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
child.wait()
"""


ARGPARSE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--tp-size")
parser.add_argument("--host")
parser.add_argument("--port")
parser.add_argument("--weight-version")
parser.parse_args()
"""


async def until_gone(pids: list[int]) -> None:
    """Wait until none of them runs; the test's timeout bounds it."""
    while any(psutil.pid_exists(pid) and _runs(pid) for pid in pids):
        await asyncio.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("guarded", [True, False])
async def test_engine_dies_with_whoever_started_it(guarded: bool) -> None:
    """SIGKILL of the rollout server ends engine and workers; without the guard they live on."""
    guard = (sys.executable, "-I", process_guard.__file__) if guarded else ()
    command = (sys.executable, "-c", PARENT, *guard, sys.executable, "-c", SERVER)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    if guarded:
        await until_gone(pids)
    else:
        assert all(_runs(pid) for pid in pids)
        for pid in pids:
            psutil.Process(pid).kill()


async def test_stop_ends_the_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ends on SIGTERM leaves workers, which are killed."""
    monkeypatch.setattr(server_process, "_STOP_SECONDS", 1.0)
    process = await SGLangProcess.start((sys.executable, "-c", SERVER))
    while not process.lines:
        await asyncio.sleep(0.01)
    pids = [int(pid) for pid in process.lines[0].split()]
    await process.stop()
    await until_gone(pids)


async def test_output_is_read_on_after_a_line_of_any_length() -> None:
    """A line that is too long is dropped; a lost worker, reported in the next one, ends SGLang."""
    lines = "print('x' * (5 << 20)); print('SIGQUIT received', flush=True)"
    process = await SGLangProcess.start(
        (sys.executable, "-c", f"{lines}; import time; time.sleep(1000)")
    )
    assert "by signal 9" in await process.wait()
    assert process.lines[-1] == "SIGQUIT received"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("no-such-python",), "sglang_command: no-such-python: No such file or directory"),
        (
            (sys.executable, "-c", ARGPARSE, "--tp-sise", "2"),
            "SGLang knows no --tp-sise; did you mean --tp-size?",
        ),
        ((sys.executable, "-c", "print('no'); raise SystemExit(9)"), "with exit code 9: no"),
        ((sys.executable, "-c", "print('no'); raise SystemExit(-1)"), "with exit code 255: no"),
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"), "by signal 9: no output"),
    ],
)
async def test_failed_start_says_what_to_change(
    command: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    """The error contains what its output reports: the command, the flag, or its last line."""
    config = RolloutServerConfig(engine="sglang", model=save_model(tmp_path / "m"))
    engine = build_engine(config)
    engine._command = command  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=re.escape(named)):
        await engine.start()
    await engine.close()
