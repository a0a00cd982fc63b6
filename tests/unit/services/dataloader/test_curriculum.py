"""Tasks get as many rollouts as it takes for one to succeed, by what a real manager recorded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from services.dataloader.config import DataloaderConfig
from services.dataloader.curriculum import enough_samples

LEAST, MOST = 2, 16


def settings(address: str = "", **changes: Any) -> DataloaderConfig:
    """Of a loader that sizes its tasks."""
    given = {"max_samples": MOST, "min_samples": LEAST, "resume": True, "state_file": Path("s")}
    return DataloaderConfig(
        run_id="run", tasks="t.jsonl", trajectory_manager=address, **{**given, **changes}
    )


@pytest.mark.parametrize("success", [0.001, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("chance", [0.01, 0.5, 0.9, 0.99])
def test_enough_samples_is_minimal(success: float, chance: float) -> None:
    """n samples fail all with (1 - p)^n; one fewer would fail too often."""
    number = enough_samples(success, chance)
    assert number >= 1
    assert 1 - (1 - success) ** number >= chance - 1e-12
    assert number == 1 or 1 - (1 - success) ** (number - 1) < chance


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_samples": -1}, "(?s)max_samples.*greater than or equal to 0"),
        ({"min_samples": 17}, "min_samples is 17: give 1 to max_samples, 16"),
        ({"min_samples": 0}, "min_samples is 0"),
        ({"success_chance": 1.0}, "success_chance is 1.0: give one between 0 and 1"),
        ({"success_chance": math.nan}, "should be a finite number"),
        ({"purpose": "eval"}, "max_samples is 16 and purpose is eval"),
        ({"resume": False}, "max_samples is 16 without resume"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str) -> None:
    """With the value and the cure."""
    with pytest.raises(ValueError, match=message):
        settings(**changes)
