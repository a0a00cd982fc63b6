"""The learning rate over a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config import TrainerConfig
from trainer.policy.policy import learning_rate


def rates(**changes: object) -> list[float]:
    """The learning rate of each of four steps."""
    fields = {"run_id": "run", "model": Path(), "checkpoint_folder": Path(), "num_steps": 4}
    config = TrainerConfig(**fields, learning_rate=1.0, **changes)  # type: ignore[arg-type]
    return [learning_rate(config, step) for step in range(1, 5)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"learning_rate_schedule": "linear"}, [0.8, 0.6, 0.4, 0.2]),
        ({"learning_rate_schedule": "linear", "warmup_steps": 2}, [0.5, 1, 2 / 3, 1 / 3]),
    ],
)
def test_the_rate_rises_to_its_value_then_stays_or_falls(
    changes: dict[str, object], expected: list[float]
) -> None:
    """Linear reaches 0 one step after the last, so that every step still counts."""
    assert rates(**changes) == pytest.approx(expected)
