"""All tasks are read before a run starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.chassis.errors import ConfigError
from services.dataloader.check_tasks import check_tasks
from services.dataloader.config import DataloaderConfig
from services.lib.tasks.sources import open_source

GOOD = '{"task_id": "a", "payload": {}}\n{"task_id": "b", "payload": {}}\n'


def config(path: Path, **fields: object) -> DataloaderConfig:
    """Of a file of tasks."""
    return DataloaderConfig(run_id="run", tasks=str(path), **fields)


def checked(config: DataloaderConfig) -> tuple[int | None, list[int]]:
    """The number of tasks, and the indexes of rows that are none."""
    number, broken = check_tasks(config, open_source(config.tasks, shuffle=False, seed=0))
    return number, sorted(broken)


def test_the_tasks_of_a_file_are_counted(tmp_path: Path) -> None:
    """All of them."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(GOOD)
    assert checked(config(path)) == (2, [])


@pytest.mark.parametrize(
    "line",
    ['{"task_id": "c", "payload": {}', '{"task_id": "c"}', '{"task_id": "a b", "payload": {}}'],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    """No JSON, or no task."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(GOOD + line)
    with pytest.raises(ConfigError, match="line 3"):
        checked(config(path))
    assert checked(config(path, broken_rows="skip")) == (2, [2])


def test_a_function_may_have_tasks_without_end() -> None:
    """Only the first few are read."""
    settings = DataloaderConfig(run_id="run", tasks="tests.lib.dataloader.support:endless")
    assert checked(settings) == (None, [])


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (GOOD, 0, ""),
        ("{", 78, "line 1 is not JSON"),
        (GOOD + GOOD, 78, "line 3 has the task id 'a', and so has"),
    ],
)
def test_as_a_command(tmp_path: Path, text: str, code: int, words: str) -> None:
    """One JSON line, or one line with file and line."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    command = [sys.executable, "-m", "services.dataloader.check_tasks"]
    done = subprocess.run(
        [*command, "--run-id=run", f"--tasks={path}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    if code == 0:
        assert json.loads(done.stdout) == {"tasks": 2, "epochs": 0, "broken": 0}
    else:
        assert f"{path} {words}" in done.stderr
