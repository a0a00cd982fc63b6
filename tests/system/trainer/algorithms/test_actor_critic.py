"""Actions, what the critic makes of them, and how it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.chassis.errors import ConfigError
from tests.lib.mostly_long import mostly_long
from tests.lib.trainer.ranks.gradients import config, greatest_error, make_case, ours, rollouts_of
from tests.lib.trainer.ranks.whole_run import greatest_difference, losses, run
from tests.lib.trainer.support import JOB_CONFIG, ROUNDING, make_model, trainer_config
from tests.suites.algorithms.formulas import (
    GAMMA,
    LAMBDA,
    MACRO,
    actor_critic,
    recursive_advantages,
)
from trainer.algorithms.actor_critic import generalised_advantages
from trainer.algorithms.base import make_algorithm

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


@pytest.fixture(scope="module")
def critic_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights than the policy's."""
    return make_model(tmp_path_factory.mktemp("critic"), seed=1)


@pytest.mark.parametrize("critic", mostly_long(["layer", "model"], "layer", short=__file__))
def test_a_critic_is_sharded_resumed_and_left_out_of_what_is_published(
    model: Path, critic_model: Path, tmp_path: Path, critic: str
) -> None:
    """Two ranks equal one, a resume equals no interruption; the critic is not published."""
    own = {"critic": "model", "critic_model": str(critic_model)}
    values = CRITIC if critic == "layer" else {**CRITIC, **own}
    steps = list(range(1, 7))
    one = run(1, model, tmp_path / "one", steps=steps, save_after=3, config=values)
    two = run(2, model, tmp_path / "two", steps=steps, config=values)
    assert losses(two) == pytest.approx(losses(one), abs=ROUNDING)
    assert greatest_difference(one, two) < ROUNDING
    checkpoint = one / "checkpoints/step_000000003"
    again = run(1, model, tmp_path / "again", steps=steps[3:], load=str(checkpoint), config=values)
    assert greatest_difference(one, again) == 0.0
    saved = load_file(checkpoint / "rank_00000_of_00001.safetensors")
    head = "value_head.weight" if critic == "layer" else "critic.value_head.weight"
    assert saved[f"parameter.{head}"].abs().max() > 0, "it learns"
    assert (
        load_file(one / "weights.safetensors").keys()
        == load_file(model / "model.safetensors").keys()
    )


def test_a_critic_s_own_model_has_a_gradient_norm_and_clipping_of_its_own(
    model: Path, critic_model: Path, tmp_path: Path
) -> None:
    """The policy's step is that of a run whose critic is a layer: neither scales the other."""
    limit = {**CRITIC, "optimizer__max_grad_norm": 1e-3}
    own = {**limit, "critic": "model", "critic_model": str(critic_model)}
    metrics = {}
    for name, values in (("layer", limit), ("model", own)):
        out = run(1, model, tmp_path / name, steps=[1], save_after=1, config=values)
        (metrics[name],) = json.loads((out / "metrics.json").read_text())
    assert metrics["model"]["critic_grad_norm"] > 1e-3
    assert metrics["model"]["critic_grad_scale"] == pytest.approx(
        1e-3 / (metrics["model"]["critic_grad_norm"] + 1e-6)
    )
    assert metrics["model"]["grad_norm"] < metrics["layer"]["grad_norm"], "that of the layer is in"
    backbone = load_file(critic_model / "model.safetensors")["model.norm.weight"].double()
    name = "rank_00000_of_00001.safetensors"
    saved = load_file(tmp_path / "model/checkpoints/step_000000001" / name)
    moved = saved["parameter.critic.backbone.norm.weight"] - backbone
    assert moved.abs().max() == 0, "the values are 0 at first, so the head learns first"
    assert saved["parameter.critic.value_head.bias"].abs().item() == pytest.approx(3e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"critic_model": "m"}, "critic_model is m but critic is 'layer'"),
        ({"critic": "model", "lora__rank": 2}, "critic is 'model' with lora.rank 2"),
    ],
)
def test_settings_of_a_critic_that_do_not_fit_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    """Before anything is loaded."""
    given = {"run_id": "r", "model": "m", "checkpoint__folder": "c", **settings}
    with pytest.raises(ValueError, match=message):
        trainer_config(**given)


def test_an_algorithm_without_a_critic_takes_no_critic_model() -> None:
    """It names the algorithms that have one."""
    given = {"run_id": "r", "model": "m", "checkpoint__folder": "c", "critic": "model"}
    with pytest.raises(ConfigError, match="'model' but algorithm grpo has no critic: remove"):
        make_algorithm(trainer_config(**given, algorithm__name="grpo"))


def test_a_checkpoint_of_another_critic_is_refused(
    model: Path, critic_model: Path, tmp_path: Path
) -> None:
    """A layer does not become a model at a resume."""
    out = run(1, model, tmp_path / "layer", steps=[1], save_after=1, config=CRITIC)
    own = {**CRITIC, "critic": "model", "critic_model": str(critic_model)}
    load = str(out / "checkpoints/step_000000001")
    with pytest.raises(ValueError, match=r"no parameter critic\..* of the critic"):
        run(1, model, tmp_path / "model", steps=[2], load=load, config=own)


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
