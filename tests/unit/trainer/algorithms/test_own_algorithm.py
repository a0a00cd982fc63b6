"""The algorithm that docs/algorithms.md shows."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from tests.lib.page_code import run_page
from tests.lib.trainer.ranks.gradients import config, make_case, ours
from trainer.algorithms.base import Rollouts, make_algorithm


def test_the_pages_algorithm_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its advantages are those that the page says, and each sequence has a gradient."""
    module = ModuleType("my_package.median")
    vars(module).update(run_page("algorithms.md", "An algorithm of your own"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    settings = config("my_package.median:median_dapo")
    algorithm = make_algorithm(settings)
    rollouts = Rollouts(
        rewards_R=np.array([1.0, 5.0, 3.0, 2.0, 0.0]),
        group_ids=list("aaabb"),
        num_tokens_R=np.ones(5, np.int64),
    )
    np.testing.assert_array_equal(algorithm.advantages(rollouts), [-2.0, 2.0, 0.0, 1.0, -1.0])
    samples, logits = make_case(0)
    found = {"loss": 0.0}
    gradients = ours(samples, logits, settings, sums=found)
    assert max(np.abs(gradient).max() for gradient in gradients) > 0
    assert np.isfinite(found["loss"])
