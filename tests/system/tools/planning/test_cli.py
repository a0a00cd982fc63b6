"""`python -m tools.planning`, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.tools.planning.test_cli import PROFILE, ROOT, row


def test_the_command_prints_the_best_split_among_others(tmp_path: Path) -> None:
    """Of 64 nodes, by a profile of both stages."""
    profile = tmp_path / "profile.toml"
    profile.write_text(PROFILE)
    path = os.pathsep.join([str(ROOT / "sdk"), str(ROOT)])
    command = [sys.executable, "-m", "tools.planning", f"--profile={profile}", "--nodes=64"]
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
    output = subprocess.run(
        command, env=environment, capture_output=True, encoding="utf-8", check=True
    ).stdout
    assert row(output, "best") == ["40", "24", "100.0", "100.0", "100.0", "0%"]
    assert row(output, "even") == ["32", "32", "125.0", "75.0", "125.0", "20%"]
    assert output.count("│ ") >= 7
