"""The project that `seamflow init` writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from seamflow.cli.main import main

from tests.lib.end_to_end.support import child_environment


def init(folder: Path) -> int:
    """Run the command; its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["init", str(folder)])
    return int(str(ended.value.code))


def test_the_project_tests_itself_and_its_configuration_is_valid(tmp_path: Path) -> None:
    """Its own tests pass, and a dry run checks every process."""
    assert init(tmp_path / "mine") == 0
    for command in (
        (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_agent.py"),
        (sys.executable, "-m", "services.launcher", "--config", "train.toml", "--dry-run"),
    ):
        done = subprocess.run(
            command,
            cwd=tmp_path / "mine",
            env=child_environment({}),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_folder_with_files_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is overwritten; the message names the folder."""
    (tmp_path / "notes.txt").write_text("mine")
    assert init(tmp_path) == 64
    assert f"{tmp_path} exists and is not empty" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
