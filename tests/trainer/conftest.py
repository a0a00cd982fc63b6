"""A tiny model for all tests of the trainer, and one undisturbed run to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.gang_run import run_rank
from tests.trainer.support import JOB_CONFIG, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder; read only."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def straight_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps on one rank without interruption, checkpoint after the fifth."""
    out = tmp_path_factory.mktemp("straight")
    job = {
        "config": JOB_CONFIG,
        "model": str(model),
        "out": str(out),
        "steps": list(range(1, 11)),
        "save_after": 5,
    }
    run_rank(job)
    return out
