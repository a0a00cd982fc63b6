"""Actions, what the critic makes of them, and how it learns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.algorithms.formulas import (
    GAMMA,
    LAMBDA,
    MACRO,
    actor_critic,
    recursive_advantages,
)
from tests.trainer.ranks.gradients import config, greatest_error, make_case, ours, rollouts_of
from tests.trainer.ranks.test_command_channel import greatest_difference, losses, run
from tests.trainer.support import JOB_CONFIG, ROUNDING
from trainer.algorithms.terms.actor_critic import generalised_advantages

ACTIONS = {"ppo": 1, "ma_ppo": MACRO, "turn_ppo": None}
CRITIC = {**JOB_CONFIG, "algorithm__name": "ppo"}


@pytest.mark.parametrize("algorithm", ACTIONS)
def test_the_critic_s_gradient_is_that_of_its_formula(algorithm: str) -> None:
    """-dL / dV of each token, by central differences with advantages held."""
    samples, logits = make_case(0)
    rollouts = rollouts_of(samples, logits)
    objective, step = actor_critic(ACTIONS[algorithm]), 1e-6
    now = [r.start for r in rollouts]
    expected = []
    for number, rollout in enumerate(rollouts):
        gradient = np.zeros(len(rollout.values))
        for t in range(len(gradient)):
            found = []
            for sign in (1, -1):
                values = [r.values.copy() for r in rollouts]
                values[number][t] += sign * step
                found.append(objective(rollouts, now, values))
            gradient[t] = (found[0] - found[1]) / (2 * step)
        expected.append(gradient)
    assert greatest_error(ours(samples, logits, config(algorithm), of_values=True), expected) < 1e-6


@pytest.mark.parametrize("num_actions", [1, 5, 256, 257, 1000])
def test_advantages_by_products_equal_the_recursion(num_actions: int) -> None:
    """Within a block and across blocks."""
    rng = np.random.default_rng(num_actions)
    values, rewards = rng.normal(size=(2, 3, num_actions))
    after = np.concatenate([values[:, 1:], np.zeros((3, 1))], 1)
    deltas = torch.from_numpy(rewards + GAMMA * after - values)
    found = generalised_advantages(deltas, GAMMA * LAMBDA)
    for row in range(3):
        expected = recursive_advantages(rewards[row].tolist(), values[row].tolist())
        np.testing.assert_allclose(found[row].numpy(), expected, rtol=1e-9, atol=1e-9)


def test_a_critic_is_sharded_resumed_and_left_out_of_what_is_published(
    model: Path, tmp_path: Path
) -> None:
    """Two ranks equal one, a resume equals no interruption; the critic is not published."""
    steps = list(range(1, 7))
    one = run(1, model, tmp_path / "one", steps=steps, save_after=3, config=CRITIC)
    two = run(2, model, tmp_path / "two", steps=steps, config=CRITIC)
    assert losses(two) == pytest.approx(losses(one), abs=ROUNDING)
    assert greatest_difference(one, two) < ROUNDING
    checkpoint = one / "checkpoints/step_000000003"
    again = run(1, model, tmp_path / "again", steps=steps[3:], load=str(checkpoint), config=CRITIC)
    assert greatest_difference(one, again) == 0.0
    saved = load_file(checkpoint / "rank_00000_of_00001.safetensors")
    assert saved["parameter.value_head.weight"].abs().max() > 0, "it learns"
    assert not [name for name in load_file(one / "weights.safetensors") if "value_head" in name]


@pytest.mark.parametrize(("given", "rate"), [(0.0, 30 * 3e-3), (2e-3, 2e-3)])
def test_the_critic_has_a_separate_learning_rate(
    model: Path, tmp_path: Path, given: float, rate: float
) -> None:
    """AdamW's first step is as long as its rate."""
    values = {**CRITIC, "algorithm__critic_learning_rate": given}
    out = run(1, model, tmp_path, steps=[1], save_after=1, config=values)
    saved = load_file(out / "checkpoints/step_000000001/rank_00000_of_00001.safetensors")
    assert saved["parameter.value_head.bias"].abs().item() == pytest.approx(rate, rel=1e-5)


def test_a_critic_comes_to_expect_the_reward(model: Path, tmp_path: Path) -> None:
    """Its error falls to a fraction while the same samples are trained on again and again."""
    values = {**CRITIC, "optimizer__learning_rate": 1e-2, "algorithm__gae_lambda": 1.0}
    out = run(1, model, tmp_path, steps=[1] * 60, config=values)
    errors = [metrics["value_error"] for metrics in json.loads((out / "metrics.json").read_text())]
    assert errors[-1] < errors[0] / 4
