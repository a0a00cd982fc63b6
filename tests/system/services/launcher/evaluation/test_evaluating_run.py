"""A whole run that is evaluated beside training; tests/suites/killed_evaluation adds a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.end_to_end.support import ROOT, child_environment
from tests.lib.launcher.evaluation.killing_run import check, make_run
from tests.lib.launcher.evaluation.labelled_agent import FOLDER_VARIABLE, SCORES


@pytest.mark.long(short="tests/system/services/evaluator/test_process.py")
@pytest.mark.timeout(240)
async def test_a_run_is_evaluated_beside_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned versions, the best checkpoint, an early end; then the best one is evaluated alone."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    run = make_run(tmp_path, kills=False, timeout_seconds=60.0)
    check(run, await run.train(), hangs=False)
    evaluate(tmp_path, run.layout.folder / "checkpoints" / "best")


def evaluate(folder: Path, checkpoint: Path) -> None:
    """`seamflow evaluate` with the kept checkpoint gives the agent's score, of one version."""
    (folder / "labels").unlink()
    command = [sys.executable, "-m", "seamflow.cli.main", "evaluate", str(folder / "run.toml")]
    flags = {
        "--checkpoint": checkpoint,
        "--tasks": folder / "heldout.jsonl",
        "--samples": 2,
        "--metric": "score",
        "--out": folder / "result.json",
    }
    arguments = [str(part) for flag in flags.items() for part in flag]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=child_environment({FOLDER_VARIABLE: str(folder)}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert (result["mean"], result["num_rollouts"]) == (SCORES[0], 4)
    assert result["step"] == json.loads((checkpoint / "best.json").read_text())["step"]
    assert list(result["pass_at"]) == ["1", "2"]
    assert f"step {result['step']}: score 0.25" in done.stdout


def test_a_wrong_command_line_ends_the_command(tmp_path: Path) -> None:
    """With one line and an exit code of its own; nothing is started."""
    command = [sys.executable, "-m", "services.launcher.evaluate_checkpoint", "--checkpoint", "x"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=child_environment({}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78, done.stderr
    assert "no configuration file" in done.stderr
    assert len(done.stderr.splitlines()) == 1
