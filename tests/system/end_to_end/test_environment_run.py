"""A whole run of an environment class, from its own tasks to the trained weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lib.end_to_end.quickstart_files import make_quickstart
from tests.lib.end_to_end.support import ROOT, child_environment

CONFIG = """
[launcher]
name = "guess"
runs_folder = "{folder}/runs"
model = "{folder}/model"
environment = "examples.guess_number:GuessNumber"
nodes = ["node-a: rollout train"]
group_size = 2
groups_per_step = 4
num_heldout = 3

[evaluation]
samples = 2

[trainer]
num_steps = 2

[trainer.tracking]
samples_every_steps = 1

[environments]
max_new_tokens = 8

[rollout_server]
max_running = 8
max_context = 256

[dataloader]
epochs = 0
"""


@pytest.mark.long(short="tests/system/end_to_end/test_training_run.py")
@pytest.mark.timeout(300)
def test_an_environment_trains_without_an_agent(tmp_path: Path) -> None:
    """Its episodes become rollouts of several turns, with the rewards that it named."""
    make_quickstart(tmp_path)
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(folder=tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "services.launcher", "--config", str(config)],
        cwd=ROOT,
        env=child_environment({}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs" / "guess" / "summary.json").read_text())
    assert summary["optimizer_steps"] == 2
    assert summary["turns"] > summary["rollouts"] >= 16
    assert summary["infrastructure_failures"] == 0
    assert summary["process_restarts"] == 0
    check_evaluations(tmp_path / "runs" / "guess")


def check_evaluations(run: Path) -> None:
    """Before and after training, of the last tasks of the environment; samples are readable."""
    evaluations = lines(run / "evaluation.jsonl")
    assert [(line["label"], line["num_rollouts"]) for line in evaluations] == [
        ("before", 6),
        ("after", 6),
    ]
    assert all(sorted(line["successes"]) == ["57", "58", "59"] for line in evaluations)
    trained = lines(run / "samples.jsonl")
    assert [row["step"] for row in trained] == [1] * 4 + [2] * 4
    # The words of the question are not in the vocabulary.
    assert all(row["prompt"].startswith("user:") for row in trained)
    evaluated = lines(run / "evaluation_samples.jsonl")
    assert len(evaluated) == 2 * 3
    assert all(row["turns"][0]["prompt"].startswith("user:") for row in evaluated)


def lines(file: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]
