"""Two processes never write to the folder of one run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.chassis.errors import ConfigError, ExitCode
from services.launcher.same_run import LOCK_FILE, hold
from tools.backup.backup_command import _hold

_HOLDER = """
import sys, pathlib
from services.launcher.same_run import hold
hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def _holder(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _HOLDER, str(folder)]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_the_second_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    """By whatever death; the message has its pid."""
    with _holder(tmp_path) as first:
        with pytest.raises(ConfigError, match=rf"in use by process {first.pid} on") as caught:
            hold(tmp_path)
        assert caught.value.exit_code == ExitCode.CONFIG
        first.kill()
    hold(tmp_path)
    assert str(os.getpid()) in (tmp_path / LOCK_FILE).read_text()


def test_other_folders_are_free(tmp_path: Path) -> None:
    """Control: the same process may hold many."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        hold(tmp_path / name)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Also for root, whom permissions do not stop."""
    with pytest.raises(ConfigError, match="nowhere"):
        hold(tmp_path / "nowhere")


def test_a_run_cannot_be_restored_into_while_it_goes_on(tmp_path: Path) -> None:
    """Nor by two at once."""
    with _holder(tmp_path) as run:
        with pytest.raises(ConfigError, match=str(run.pid)):
            _hold([tmp_path / "checkpoints", tmp_path / "weights"])
        run.kill()
    _hold([tmp_path / "checkpoints", tmp_path / "weights"])
    assert [each.name for each in tmp_path.iterdir()] == [LOCK_FILE]


@pytest.mark.parametrize("flags", [[], ["--resume"], ["--resume", "--serve"]])
def test_the_launcher_says_it_in_one_line(tmp_path: Path, flags: list[str]) -> None:
    """Before it starts anything; exit code 78."""
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    config = tmp_path / "run.toml"
    config.write_text('[launcher]\nname = "mine"\nmodel = "m"\nagent = "a:B"\ntasks = "t"\n')
    command = [sys.executable, "-m", "services.launcher", "--config", str(config), *flags]
    command += ["--runs-folder", str(tmp_path / "runs")]
    with _holder(run) as first:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        first.kill()
    assert done.returncode == ExitCode.CONFIG
    (line,) = done.stderr.splitlines()
    assert f"process {first.pid}" in line and "--resume" not in line
    assert sorted(each.name for each in run.iterdir()) == [LOCK_FILE]
    free = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "in use" not in free.stderr  # control: it fails for its lack of a model
