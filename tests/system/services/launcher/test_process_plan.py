"""What a plan says, started: ranks below torchrun, and the check of an agent."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from services.launcher.process_plan import plan
from services.launcher.supervisor import child_environment
from services.launcher.trainer_plan import ending_with_torchrun
from tests.lib.launcher.support import make_config, make_layout


@pytest.mark.parametrize("is_protected", [True, False])
def test_ranks_end_with_a_torchrun_that_is_killed(is_protected: bool, tmp_path: Path) -> None:
    """They are in sessions of their own; the control: without protection a rank goes on."""
    file = tmp_path / "pid"
    code = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    command: tuple[str, ...] = (sys.executable, "-c", code)
    command = ending_with_torchrun(command) if is_protected else command
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")
    with subprocess.Popen((*torchrun, *command)) as process:
        while not file.exists() or not file.read_text():
            time.sleep(0.05)
        process.kill()
    rank = psutil.Process(int(file.read_text()))
    try:
        gone, _ = psutil.wait_procs([rank], timeout=5 if is_protected else 0.5)
        assert bool(gone) == is_protected
    finally:
        with suppress(psutil.NoSuchProcess):
            rank.kill()


@pytest.mark.parametrize(
    ("agent", "code"), [("tests.lib.sdk.agents:Answers", 0), ("tests.lib.sdk.agents:Nobody", 78)]
)
def test_a_dry_run_loads_the_agent(tmp_path: Path, agent: str, code: int) -> None:
    """The check of the agent runner ends well for an agent that exists alone."""
    config = make_config(agent=agent)
    check = plan(config, make_layout(config, tmp_path))["agent_runner"].check
    assert check is not None
    done = subprocess.run(check, env=child_environment({}), capture_output=True, check=False)
    assert done.returncode == code
