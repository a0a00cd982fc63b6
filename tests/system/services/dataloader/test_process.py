"""The dataloader as an operator meets it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.lib.dataloader.support import Queue, numbered, serving, write_jsonl


async def dataloader(address: str, tasks: str) -> tuple[int | None, str]:
    """Run `python -m services.dataloader` to its end; exit code and stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.dataloader", "--port", "0", "--admin-port", "-1", "--run-id", "run"),
        *("--epochs", "1"),
        *("--trajectory-manager", address, "--tasks", tasks),
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, stderr.decode()


async def test_it_ends_clean_when_all_is_submitted(tmp_path: Path) -> None:
    """Exit code 0, every task there."""
    tasks, queue = write_jsonl(tmp_path / "t.jsonl", numbered(200)), Queue(capacity=500)
    async with serving(queue) as address:
        assert await dataloader(address, tasks) == (0, "")
    assert len(queue.tasks) == 200


async def test_a_bad_line_ends_it_with_the_configuration_code(tmp_path: Path) -> None:
    """Exit code 78 and one line that names file, line and cure."""
    tasks = write_jsonl(tmp_path / "t.jsonl", [*numbered(1), "b"])
    async with serving(Queue()) as address:
        code, stderr = await dataloader(address, tasks)
    assert code == 78
    assert "t.jsonl line 2" in stderr
    assert "Traceback" not in stderr


async def test_it_looks_at_all_tasks_before_it_submits_any(tmp_path: Path) -> None:
    """Where no launcher has done it: two tasks with one id, the second far behind."""
    tasks = write_jsonl(tmp_path / "t.jsonl", [*numbered(200), *numbered(1)])
    async with serving(queue := Queue(capacity=500)) as address:
        code, stderr = await dataloader(address, tasks)
    assert code == 78
    assert "t.jsonl line 201 has the task id 't0'" in stderr
    assert "t.jsonl line 1:" in stderr
    assert queue.tasks == {}
