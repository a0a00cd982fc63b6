"""All configurations of a run, checked in one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.chassis.config.load import TABLES
from services.chassis.errors import ConfigError, UsageError
from services.launcher.checks.run_settings import CLASSES, check_settings
from services.launcher.process_plan import plan
from tests.lib.launcher.support import make_config, make_layout

NOT_OF_PROCESSES = {"launcher", "evaluation", "agent_runner"}
"""The launcher's own, and that of the SDK's runner, which takes flags and variables alone."""


def settings(folder: Path, text: str, **changes: object) -> Mapping[str, object]:
    """Those of the processes that a file with `text` describes."""
    (folder / "run.toml").write_text(text)
    (folder / "model").mkdir(exist_ok=True)
    config = make_config(**changes)
    return check_settings(plan(config, make_layout(config, folder)).values())


def test_every_table_has_a_class() -> None:
    """A new process is checked too, or this fails."""
    assert CLASSES.keys() == set(TABLES) - NOT_OF_PROCESSES


def test_every_process_reads_its_own(tmp_path: Path) -> None:
    """With its variables and the flags of --set, which leave no trace in this process."""
    before = dict(os.environ)
    found = settings(
        tmp_path,
        "[trainer]\nnum_steps = 7\n",
        set=("rollout_server.max_running=3",),
        nodes=("a: rollout", "b: rollout train"),
    )
    assert vars(found["trainer"])["num_steps"] == 7
    assert vars(found["rollout_server-b"])["max_running"] == 3
    assert vars(found["node_agent-a"])["node_id"] == "a"
    assert dict(os.environ) == before


def test_all_mistakes_are_told_once_each(tmp_path: Path) -> None:
    """With the file, the table, the key and its nearest; two node agents say it once."""
    with pytest.raises(ConfigError) as refused:
        settings(tmp_path, "[trainer]\nnmu_steps = 7\n[node_agent]\nprot = 1\n")
    first, second = str(refused.value).splitlines()
    assert first.endswith("run.toml [trainer] nmu_steps: unknown key; did you mean num_steps?")
    assert "[node_agent] prot: unknown key; did you mean port?" in second


def test_an_unknown_flag_is_wrong_usage(tmp_path: Path) -> None:
    """As on a process's own command line."""
    with pytest.raises(UsageError, match="trainer: unknown argument --nmu-steps=3; did you mean"):
        settings(tmp_path, "", set=("trainer.nmu_steps=3",))
