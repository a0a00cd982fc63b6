"""What `make test-compose` needs is named whole, before it begins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.deploy.support import ROOT


@pytest.mark.parametrize("module", ["tests.suites.compose", "tests.suites.chart_pods"])
def test_the_command_names_them_and_ends_with_69(module: str, tmp_path: Path) -> None:
    """On a PATH without any of them: no traceback, and nothing begun."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--data-root", str(tmp_path / "data")],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 69
    assert "Traceback" not in done.stderr
    for name in ("docker", "docker-compose", "dockerd", "iptables", "ip"):
        assert f"  {name}: " in done.stderr
    assert "apt-get install" in done.stderr
    assert not (tmp_path / "data").exists()
