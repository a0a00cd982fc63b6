"""The learning rate over a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.trainer.support import trainer_config
from trainer.policy.optimizer import learning_rate


def rates(**changes: object) -> list[float]:
    """The learning rate of each of four steps."""
    fields = {"run_id": "run", "model": Path(), "checkpoint__folder": Path(), "num_steps": 4}
    config = trainer_config(**{**fields, **changes}, optimizer__learning_rate=1.0)
    return [learning_rate(config, step) for step in range(1, 5)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"optimizer__warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"optimizer__schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"optimizer__schedule": "linear", "optimizer__warmup_steps": 2}, [0.5, 1, 2 / 3, 1 / 3]),
        ({"optimizer__schedule": "linear", "optimizer__final_share": 0.5}, [1, 0.875, 0.75, 0.625]),
        ({"optimizer__schedule": "cosine", "num_steps": 3}, [1, 0.75, 0.25, 0.0]),
        (
            {"optimizer__schedule": "cosine", "optimizer__final_share": 0.1, "num_steps": 3},
            [1, 0.775, 0.325, 0.1],
        ),
    ],
)
def test_the_rate_rises_to_its_value_then_stays_or_falls(
    changes: dict[str, object], expected: list[float]
) -> None:
    """Linear reaches 0 one step after the last, so that every step still counts."""
    assert rates(**changes) == pytest.approx(expected)
