"""A user's project may have files of any name: none is taken for one of ours or of Python's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.launcher.supervisor import child_environment

OURS = ("services", "trainer", "scheduler", "rollout", "trajectory_manager", "tools")
PYTHONS = ("types", "queue", "random", "logging", "redis", "torch", "enum", "json")
SHOUT = "import sys; sys.stderr.write(f'{__file__} of the user ran\\n'); sys.exit(3)\n"
AGENT = """
import helper

class Mine:
    async def run(self, task, rollout):
        return helper.REWARD
"""


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python process as the launcher starts it, in the user's folder."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=child_environment({"SEAMFLOW_USER_FOLDER": str(folder), **variables}),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A file for each name, and a package."""
    for name in (*OURS, *PYTHONS):
        (tmp_path / f"{name}.py").write_text(SHOUT)
    (tmp_path / "rollout.py").unlink()
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout/__init__.py").write_text(SHOUT)
    return tmp_path


def test_processes_are_ours_whatever_the_folder_has(project: Path) -> None:
    """With the command that the launcher uses; control: as Python does without it."""
    for module in ("scheduler", "rollout.gateway", "services.weights"):
        started = run(project, "-m", module, "--help")
        assert (started.returncode, started.stderr) == (0, ""), module
        assert "run_id" in started.stdout or "port" in started.stdout
    assert "of the user ran" in run(project, "-m", "scheduler", PYTHONSAFEPATH="").stderr


@pytest.mark.parametrize("name", ["my_agent", "trainer", "rollout.mine", "services"])
def test_plug_ins_are_the_user_s_whatever_their_name(project: Path, name: str) -> None:
    """With what they import from the folder."""
    path = project / f"{name.replace('.', '/')}.py"
    path.write_text(AGENT)
    (project / "rollout/__init__.py").write_text("")
    (project / "helper.py").write_text("REWARD = 1.0\n")
    loads = "from seamflow.runner.agent_runner import load_agent; print(load_agent({!r}))"
    loaded = run(project, "-c", loads.format(f"{name}:Mine"))
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert f"{name}.Mine object" in loaded.stdout


def test_a_plug_in_with_the_name_of_a_process_is_refused_there(project: Path) -> None:
    """Where the process has loaded its own module already."""
    loads = "import trainer\nfrom services.chassis.plugins import load\nload('trainer:Mine')"
    refused = run(project, "-c", loads)
    assert "trainer.py has the name of a module that this process needs: rename it" in (
        refused.stderr
    )
    assert "of the user ran" not in refused.stderr
