"""A whole run: launcher, real processes, torch engine, FSDP trainer, scheduler with lending."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.end_to_end.quickstart_files import make_quickstart
from tests.lib.end_to_end.support import ROOT, child_environment

STEPS = 3
CONFIG = """
[launcher]
name = "whole"
runs_folder = "{folder}/runs"
model = "{folder}/model"
tasks = "{folder}/tasks.jsonl"
agent = "examples.quickstart.agent:ElevatorAgent"
nodes = ["node-a: rollout", "node-b: rollout train"]
concurrency = 8
group_size = 2
groups_per_step = 4
lease_seconds = 60

[trainer]
num_steps = {steps}

[trainer.optimizer]
learning_rate = 1e-3

[rollout_server]
max_running = 8
max_context = 256

[scheduler]
lending = "always"

[dataloader]
epochs = 0
"""


def prepare(folder: Path) -> Path:
    """A model without warm start, tasks, and the configuration file of the run."""
    make_quickstart(folder)
    config = folder / "run.toml"
    config.write_text(CONFIG.format(folder=folder, steps=STEPS))
    return config


@pytest.mark.timeout(300)
def test_a_run_trains_and_lends_and_loses_nothing(tmp_path: Path) -> None:
    """Optimizer steps are taken and published, node-b changes sides, every token is recorded."""
    command = [sys.executable, "-m", "services.launcher", "--config", str(prepare(tmp_path))]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment({}), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs" / "whole" / "summary.json").read_text())
    assert summary["optimizer_steps"] == summary["weight_updates"] == STEPS
    assert summary["node_lendings"] >= 1
    assert summary["node_returns"] >= 1
    received, recorded = summary["tokens_received_by_agents"], summary["tokens_recorded"]
    assert 0 < received <= recorded
    lost = [summary[f"tokens_{what}"] for what in ("lost", "duplicated", "with_wrong_version")]
    assert lost == [0, 0, 0]
    steps = [
        json.loads(line)
        for line in (tmp_path / "runs" / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert any((tmp_path / "runs" / "whole" / "checkpoints").iterdir())
