"""The option --set of `seamflow train`."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.chassis.config.load import load
from services.launcher.config import LauncherConfig, flags_by_table, own_settings
from services.launcher.process_plan import plan
from tests.lib.launcher.support import make_config, make_layout


def test_settings_become_flags_of_their_processes(tmp_path: Path) -> None:
    """Every process of the table gets them, also when only its configuration is checked."""
    given = ("trainer.optimizer.learning_rate=1e-5", "rollout_server.max_running=3")
    config = make_config(set=given)
    processes = plan(config, make_layout(config, tmp_path))
    assert processes["trainer"].command[-1] == "--optimizer.learning-rate=1e-5"
    assert processes["trainer"].settings is not None
    assert processes["trainer"].settings[-1] == "--optimizer.learning-rate=1e-5"
    servers = [each for name, each in processes.items() if name.startswith("rollout_server")]
    assert servers
    assert {each.command[-1] for each in servers} == {"--max-running=3"}
    assert "=" not in processes["scheduler"].command[-1]


def test_ranks_of_a_trainer_get_them_too(tmp_path: Path) -> None:
    """They are started by torchrun."""
    config = make_config(set=("trainer.num_steps=3",), trainer_ranks=2)
    trainer = plan(config, make_layout(config, tmp_path))["trainer"]
    assert trainer.command[-1] == "--num-steps=3"
    assert trainer.settings is not None
    assert "--num-steps=3" in trainer.settings


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ("trainr.num_steps=1", "did you mean trainer?"),
        ("trainer.num_steps", "write it as TABLE.SETTING=VALUE"),
        ("num_steps=1", "write it as TABLE.SETTING=VALUE"),
    ],
)
def test_what_names_no_setting_of_a_process_is_refused(given: str, cure: str) -> None:
    """With the value and the cure."""
    with pytest.raises(ValueError, match=f"set is '{given}'") as refused:
        flags_by_table([given])
    assert cure in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        'rollout_server.sglang_flags=["--device", "cpu"]',
        "rollout_server.weight_transports=relay,shard_stream",
        'trainer.plugin={"a": [1, "x, y"]}',
        'tool_loop.prompt="Say \\n, then {question}", now',
        "tool_loop.answer_pattern=\\d+",
    ],
)
def test_a_value_reaches_its_process_as_it_was_given(text: str) -> None:
    """Lists, tables, commas and quotes too; with a second one beside it."""
    given = own_settings(["--set", text, "--set", "trainer.num_steps=3"])
    arguments = ["--name", "n", "--model", "m", "--tasks", "t", "--agent", "a:b", *given]
    assert load(LauncherConfig, "launcher", arguments).set == (text, "trainer.num_steps=3")


def test_settings_of_the_launcher_are_its_own_flags() -> None:
    """Those of other processes stay, in both forms of the flag."""
    given = ["--set", "launcher.name=m1", "--config", "run.toml", "--set=trainer.num_steps=3"]
    assert own_settings(given) == [
        "--config",
        "run.toml",
        "--set=trainer.num_steps=3",
        "--name=m1",
    ]
    assert own_settings(["--set"]) == ["--set"]


def test_the_file_itself_sets_nothing_of_the_launcher_by_set() -> None:
    """It has a table for that."""
    with pytest.raises(ValueError, match="give --group-size=4"):
        make_config(set=("launcher.group_size=4",))
