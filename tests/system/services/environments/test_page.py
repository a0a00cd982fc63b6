"""What docs/environments.md shows works as it is written there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from seamflow.environment.environment_class import reward_function

from services.tool_loop.config import ToolLoopConfig

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The code of the page in this language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_the_example_runs(tmp_path: Path) -> None:
    """The class, and the way to try it."""
    program = tmp_path / "try_it.py"
    program.write_text("\n\n".join(blocks("python")[:2]))
    ended = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "sdk")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Guess a number from 1 to 9." in ended.stdout
    assert "Step(" in ended.stdout


def test_the_reward_function_can_be_served() -> None:
    """It takes what it is given."""
    found: dict[str, object] = {}
    exec(blocks("python")[2], found)
    assert reward_function(found["reward"]) is found["reward"]


def test_the_settings_of_the_tool_loop_are_valid() -> None:
    """All of them."""
    (table,) = (tomllib.loads(block)["tool_loop"] for block in blocks("toml"))
    config = ToolLoopConfig.model_validate(table)
    assert config.rewards["reward"] == "math"
    assert config.mcp_servers["files"].arguments == ("python", "file_server.py")
