"""The quickstart's model and tasks, made once for all runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lib.end_to_end.support import ROOT
from tests.lib.sglang.quickstart import Quickstart, make_quickstart

PYTHON = ROOT / ".venv-sglang/bin/python"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the quickstart's preparation writes, with the launcher's mark that it is complete."""
    folder = tmp_path_factory.mktemp("quickstart") / "prepared"
    command = [
        sys.executable,
        "-m",
        "examples.quickstart.prepare",
        "--out",
        str(folder),
        "--seed",
        "0",
    ]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    (folder / ".complete").touch()
    return folder


@pytest.fixture
def quickstart(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Quickstart]:
    """Makes the run of a test; its settings are those of the file and the flags given."""
    assert PYTHON.exists(), f"{PYTHON} is missing: use `make test-sglang`, which makes it"
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Every version is needed to recompute log-probs afterwards.
    monkeypatch.setenv("SEAMFLOW_WEIGHTS_KEEP_VERSIONS", "100000")

    def make(name: str, *flags: str) -> Quickstart:
        shutil.copytree(prepared, tmp_path / name / "prepared")
        return make_quickstart(tmp_path / name, *flags)

    return make
