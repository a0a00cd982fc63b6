"""A run whose folder is moved, deleted or made read-only ends, and says what became of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launcher.child_process import ProcessPlan
from services.launcher.supervisor import ChildFailed, Supervisor


async def test_a_child_that_cannot_log_is_a_failure(tmp_path: Path) -> None:
    """It cannot be started again after a crash; the run does not wait for it for ever."""
    logs = tmp_path / "logs"
    logs.mkdir()
    async with Supervisor(logs, restart_seconds=0.0) as processes:
        await processes.start(ProcessPlan(name="short", command=("sleep", "0.2")))
        await processes.start(ProcessPlan(name="bad", command=("sh", "-c", "sleep 0.2; exit 1")))
        logs.rename(tmp_path / "elsewhere")
        with pytest.raises(ChildFailed, match=r"cannot be started again: .*No such file"):
            await processes.failure()
