"""Held-out tasks are read with the settings of training, unless they have their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.launcher.evaluation import heldout_fields
from services.lib.evaluation import EvaluationConfig
from services.lib.tasks.task_rows import RowFields
from tests.lib.launcher.support import make_config

ROOT = Path(__file__).parents[5]
TRAINING = '[dataloader]\ntask_id_field = "id"\npayload = {question = "{q}"}\n'
OF_TRAINING = RowFields(task_id_field="id", payload={"question": "{q}"})
RUN = """
[launcher]
name = "dry"
prepare = "tiny_model"
model = "{run}/model"
tasks = "tasks.jsonl"
agent = "tests.lib.launcher.evaluation.labelled_agent:LabelledAgent"

[dataloader]
payload = {question = "{q}"}

[evaluation]
tasks = "heldout.jsonl"
"""


@pytest.mark.parametrize(
    ("evaluation", "changes", "right"),
    [
        ({}, {}, OF_TRAINING),
        ({"payload": {}}, {}, RowFields(task_id_field="id")),
        ({"task_id_field": ""}, {}, RowFields(task_id_field="", payload={"question": "{q}"})),
        (
            {},
            {"set": ('dataloader.payload={"a": "{b}"}',)},
            RowFields(task_id_field="id", payload={"a": "{b}"}),
        ),
    ],
)
def test_fields_are_those_of_training_by_default(
    tmp_path: Path, evaluation: dict[str, Any], changes: dict[str, Any], right: RowFields
) -> None:
    """Each that [evaluation] sets is its own."""
    file = tmp_path / "run.toml"
    file.write_text(TRAINING)
    settings = EvaluationConfig(**evaluation)
    assert heldout_fields(make_config(**changes), settings, file) == right


def test_a_dry_run_names_a_broken_row(tmp_path: Path) -> None:
    """Before anything starts."""
    (tmp_path / "tasks.jsonl").write_text('{"q": "a"}\n')
    (tmp_path / "heldout.jsonl").write_text('{"q": "c"}\n{"q": null}\n')
    (tmp_path / "run.toml").write_text(RUN)
    command = [sys.executable, "-m", "services.launcher", "--config", "run.toml", "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'sdk'}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "held-out tasks: heldout.jsonl line 2 has null as 'q'" in done.stderr
    assert done.returncode == 78
