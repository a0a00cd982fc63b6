"""`make test-algorithms`: every algorithm against its paper's formula and TRL's loss.

The formulas are those of the tests (`tests/suites/algorithms/formulas.py`), differentiated
numerically; what is compared is the gradient, relative to its greatest element, and the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.report import Report
from tests.lib.trainer.ranks.gradients import config, greatest_error, make_case, ours, rollouts_of
from tests.suites.algorithms.formulas import (
    BETA,
    OBJECTIVES,
    Rollout,
    differences,
    group_relative,
    grpo_near_reference,
    less_mean,
)
from tests.suites.algorithms.trl_loss import TRL, trl_loss
from trainer.config import TrainerConfig

SEEDS = range(10)


def main() -> None:
    """Compare and report."""
    formulas = [_formula_error(name, seed) for name in OBJECTIVES for seed in SEEDS]
    penalties = [_penalty_error(estimator, seed) for estimator in ("k2", "k3") for seed in SEEDS]
    others = [_trl_error(name, seed) for name in TRL for seed in SEEDS]
    figures = {
        "algorithms_checked": float(len(OBJECTIVES)),
        "max_reference_error": max(*formulas, *penalties),
        "trl_losses_checked": float(len(TRL)),
        "max_trl_error": max(others),
    }
    packages = ("seamflow", "torch", "trl")
    report = Report(bench="algorithms", figures=figures, seeds=list(SEEDS), packages=packages)
    report.publish()


def _formula_error(name: str, seed: int) -> float:
    rollouts = rollouts_of(*make_case(seed))
    expected = differences(OBJECTIVES[name], rollouts)
    loss = -OBJECTIVES[name](rollouts, [rollout.start for rollout in rollouts])
    return _error(config(name), seed, loss, expected)


def _penalty_error(estimator: str, seed: int) -> float:
    rollouts, objective = rollouts_of(*make_case(seed)), grpo_near_reference(estimator)
    loss = -objective(rollouts, [rollout.start for rollout in rollouts])
    settings = config("grpo", kl__loss=BETA, kl__estimator=estimator)
    return _error(settings, seed, loss, differences(objective, rollouts))


def _trl_error(name: str, seed: int) -> float:
    rollouts = rollouts_of(*make_case(seed))
    loss, expected = trl_loss(name, rollouts, _advantages(name, rollouts))
    near = name == "grpo near a reference"
    settings = config("grpo", kl__loss=BETA) if near else config(name)
    return _error(settings, seed, loss, expected)


def _advantages(name: str, rollouts: Sequence[Rollout]) -> list[float]:
    advantage = less_mean if name == "dr_grpo" else group_relative
    return [advantage(rollout, rollouts) for rollout in rollouts]


def _error(settings: TrainerConfig, seed: int, loss: float, expected: list[np.ndarray]) -> float:
    """The greater of the gradient's and the loss's."""
    found = {"loss": 0.0}
    gradient = ours(*make_case(seed), settings, sums=found)
    return max(greatest_error(gradient, expected), abs(found["loss"] / loss - 1))


if __name__ == "__main__":
    main()
