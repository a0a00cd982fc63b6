"""`python -m deploy.docker.smoke`: what an image has; a part that does not work fails it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.end_to_end.support import ROOT, child_environment


@pytest.mark.parametrize(
    "works",
    [pytest.param(True, marks=pytest.mark.long(short="tests/system/deploy/test_smoke.py")), False],
)
def test_a_part_that_cannot_be_imported_fails(tmp_path: Path, works: bool) -> None:
    """And is named; *control*: here all can be."""
    if not works:
        (tmp_path / "torch.py").write_text("raise ImportError('libcudart is missing')")
    environment = child_environment({})
    paths = [str(tmp_path), str(ROOT), environment.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "deploy.docker.smoke"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if works else 1), done.stdout
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert {"torch", "sglang", "trainer.cli", "setpriv", "nvidia-smi"} <= lines.keys()
    assert ("libcudart is missing" in lines["torch"]) != works
