"""`python -m tests.suites.killed_evaluation`: a server is killed, agents hang."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.lib.launcher.evaluation.killing_run import KillingRun, check, make_run
from tests.lib.launcher.evaluation.labelled_agent import FOLDER_VARIABLE, HANG_VARIABLE


def main() -> None:
    """Run it; an AssertionError says what did not hold."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {FOLDER_VARIABLE: folder, HANG_VARIABLE: "1"}
        run, summary = asyncio.run(_run(Path(folder)))
        check(run, summary, hangs=True)
        assert summary["process_restarts"] == 1
    print("the killed server went back to the version, and the evaluation had its result")


async def _run(folder: Path) -> tuple[KillingRun, dict[str, Any]]:
    run = make_run(folder, kills=True, timeout_seconds=40.0)
    return run, await run.train()


if __name__ == "__main__":
    main()
