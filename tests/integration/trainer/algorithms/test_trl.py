"""Our losses against TRL's, on the same tensors; `make test-algorithms` installs it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lib.trainer.ranks.gradients import config, greatest_error, make_case, ours, rollouts_of
from tests.suites.algorithms.formulas import (
    BETA,
    differences,
    group_relative,
    less_mean,
    reinforce_pp,
)
from tests.suites.algorithms.trl_loss import TRL, trl_loss
from trainer.config import TrainerConfig

pytest.importorskip("trl")


def settings(name: str) -> TrainerConfig:
    """Of one of TRL's."""
    if name == "grpo near a reference":
        return config("grpo", kl__loss=BETA)
    return config(name)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(TRL))
def test_loss_and_gradient_are_those_of_trl(name: str, seed: int) -> None:
    """To 1e-5, on ragged batches of mixed versions, with the advantages of the algorithm."""
    samples, logits = make_case(seed)
    rollouts, found = rollouts_of(samples, logits), {"loss": 0.0}
    advantage = less_mean if name == "dr_grpo" else group_relative
    expected, gradient = trl_loss(name, rollouts, [advantage(r, rollouts) for r in rollouts])
    assert greatest_error(ours(samples, logits, settings(name), sums=found), gradient) < 1e-5
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    other = differences(reinforce_pp, rollouts)
    assert greatest_error(other, gradient) > 1e-3, "another algorithm does not pass for it"
    assert max(np.abs(each).max() for each in gradient) > 0
