"""A whole run that is evaluated beside training: `killed_evaluation` beside it adds a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.evaluation.killing_run import check, make_run
from tests.launcher.evaluation.labelled_agent import FOLDER_VARIABLE


@pytest.mark.timeout(240)
async def test_a_run_is_evaluated_beside_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned versions, the best checkpoint, an evaluation that is given up, an early end."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    run = make_run(tmp_path, kills=False, timeout_seconds=10.0)
    check(run, await run.train())
