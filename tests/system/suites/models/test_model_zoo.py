"""A folder is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suites.models.__main__ import refusal_problems
from tests.suites.models.model_run import launch
from tests.suites.models.refusals import REFUSALS


@pytest.mark.timeout(60)
def test_a_model_of_other_layers_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """And the run's name is free again afterwards."""
    model = tmp_path / "model"
    REFUSALS["lfm2"].make(model)
    for _ in range(2):
        outcome = launch(model, tmp_path, 0)
        assert refusal_problems(REFUSALS["lfm2"], model, outcome) == []
    assert not (tmp_path / "runs" / "run").exists()
