"""Every example of docs/from_trl_and_verl.md is valid, and every setting that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from services.chassis.config.load import load
from services.chassis.errors import ConfigError
from services.launcher.checks.prerequisites import check_evaluation
from services.launcher.checks.run_settings import check_settings
from services.launcher.checks.user_code import check_user_code
from services.launcher.config import LauncherConfig
from services.launcher.process_plan import plan
from services.lib.evaluation import EvaluationConfig
from tests.lib.launcher.support import make_layout
from tools.reference.configuration import settings_of

PAGE = (Path(__file__).parents[4] / "docs" / "from_trl_and_verl.md").read_text()
BLOCKS = dict(re.findall(r"## ([^\n]+)\n(?:(?!\n## ).)*?```toml\n(.*?)```", PAGE, re.DOTALL))
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROW = '{"question": "1 + 1", "answer": "2"}\n'


def check(text: str, folder: Path) -> LauncherConfig:
    """What `seamflow train` reads of the file before it starts anything."""
    (folder / "models" / "my-model").mkdir(parents=True)
    for name in ("tasks.jsonl", "heldout.jsonl"):
        (folder / name).write_text(ROW)
    file = folder / "run.toml"
    file.write_text(text)
    config = load(LauncherConfig, "launcher", ["--config", str(file)])
    layout = make_layout(config.replace(http_port=0), folder)
    evaluation = load(EvaluationConfig, "evaluation", ["--config", str(file)])
    plans = plan(config, layout, evaluation)
    check_settings(plans.values())
    check_evaluation(config, evaluation)
    if "evaluator" in plans:
        check_user_code(config, layout, {"evaluator": plans["evaluator"]})
    return config


def test_the_page_has_the_examples_that_it_promises() -> None:
    """One under each heading."""
    assert list(BLOCKS) == [
        "KL to a reference",
        "Two rewards",
        "LoRA",
        "Tool loop",
        "An agent over HTTP, against compose",
    ]


@pytest.mark.parametrize("name", BLOCKS)
def test_every_example_is_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the classes that will read it."""
    monkeypatch.chdir(tmp_path)
    check(BLOCKS[name], tmp_path)


def test_a_misspelt_example_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="did you mean loss"):
        check(BLOCKS["KL to a reference"].replace("loss =", "losss ="), tmp_path)


def test_every_program_is_python() -> None:
    """As far as its syntax says."""
    assert len(PROGRAMS) == 2
    for program in PROGRAMS:
        ast.parse(program)


def test_every_setting_of_the_table_exists() -> None:
    """`name` … in `[table]`: a setting of that table."""
    named = 0
    for line in PAGE.splitlines():
        ours = line.rsplit("|", 2)[-2] if line.startswith("|") and "---" not in line else ""
        for before, table in re.findall(r"((?:`[^`]+`(?:, | and )?)+) in `\[([\w.]+)\]`", ours):
            for setting in re.findall(r"`(\w+)[^`]*`", before):
                assert setting in names_of(table), (table, setting)
                named += 1
    assert named > 40


def names_of(table: str) -> set[str]:
    """Settings of a table such as trainer.kl."""
    first, *nested = table.split(".")
    settings: Any = settings_of()[first]
    for name in nested:
        settings = settings.model_fields[name].annotation
    return set(settings.model_fields)
