"""Steps of several updates: mini-batches and epochs over a leased batch."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.chassis.errors import ConfigError
from tests.lib.mostly_long import mostly_long
from tests.lib.trainer.child import Child
from tests.lib.trainer.ranks.whole_run import greatest_difference, losses, run, same_rows
from tests.lib.trainer.services import Neighbours
from tests.lib.trainer.support import JOB_CONFIG, ROUNDING, read_lines, trainer_config
from trainer.algorithms.base import make_algorithm
from trainer.algorithms.policy_gradient import Importance, Ratios
from trainer.policy.policy import Policy

STEPS = [1, 2, 3, 4]
OFTEN = {
    **JOB_CONFIG,
    "algorithm__name": "ppo",
    "algorithm__num_mini_batches": 3,
    "algorithm__num_epochs": 2,
    "critic": "model",
}
NUM_UPDATES = 6
NAME = "rank_00000_of_00001.safetensors"


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank without interruption, checkpoint after the second step."""
    out = tmp_path_factory.mktemp("often")
    return run(1, model, out, steps=STEPS, save_after=2, config=OFTEN)


def test_each_step_updates_the_weights_several_times(whole: Path) -> None:
    """The optimizer counts; tokens after the first update are off the proximal policy."""
    saved = load_file(whole / "checkpoints/step_000000002" / NAME)
    assert saved["step.model.norm.weight"].item() == 2 * NUM_UPDATES
    metrics = json.loads((whole / "metrics.json").read_text())
    assert all(each["num_groups"] == 3 for each in metrics)
    assert metrics[0]["log_ratio_squared_mean"] > 0


def test_a_resume_equals_no_interruption(model: Path, whole: Path, tmp_path: Path) -> None:
    """Bit for bit: mini-batches depend on seed and step alone."""
    load = str(whole / "checkpoints/step_000000002")
    again = run(1, model, tmp_path, steps=STEPS[2:], load=load, config=OFTEN)
    assert greatest_difference(again, whole) == 0.0
    assert losses(again) == losses(whole)[2:]


@pytest.mark.parametrize("backend", mostly_long(["fsdp", "pipeline"], "fsdp", short=__file__))
def test_two_ranks_and_one_train_the_same(
    model: Path, whole: Path, tmp_path: Path, backend: str
) -> None:
    """Log-probs and values at the start of the step are kept where the loss is computed."""
    out = run(2, model, tmp_path, steps=STEPS, config={**OFTEN, "backend": backend})
    assert losses(out) == pytest.approx(losses(whole), abs=ROUNDING)
    assert greatest_difference(out, whole) < ROUNDING
    assert same_rows(out, whole)


def test_an_update_of_rows_that_a_rank_has_not_predicted_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come with `Predict` alone: without it nothing is trained in their place."""
    monkeypatch.setattr(Policy, "predict", lambda *_: None)
    with pytest.raises(ValueError, match=r"mini-batch \d has not been predicted on this rank"):
        run(1, model, tmp_path, steps=[1], config=OFTEN)


def test_another_seed_deals_other_mini_batches(model: Path, whole: Path, tmp_path: Path) -> None:
    """Negative control: the order of the groups matters."""
    out = run(1, model, tmp_path, steps=STEPS, config={**OFTEN, "seed": 1})
    assert greatest_difference(out, whole) > 1e-4


@pytest.mark.long(short="tests/system/trainer/test_mini_batches.py")
async def test_a_crash_between_two_updates_repeats_the_whole_step(
    tmp_path: Path, model: Path, whole: Path
) -> None:
    """SIGKILL in the middle of the third step; the weights are those of an undisturbed run."""
    around = Neighbours(tmp_path / "weights")
    flags = [f"--{n.replace('__', '.').replace('_', '-')}={v}" for n, v in OFTEN.items()]
    async with around.serving():
        child = Child(tmp_path, model, around)
        await child.start(
            *flags, "--num-steps=4", launcher=("-m", "tests.system.trainer.dying_updates")
        )
        code, output = await child.finish()
        assert code == -signal.SIGKILL, output
        assert around.weights.manifests[0].step == 1
        await child.start(*flags, "--num-steps=4", "--resume")
        code, output = await child.finish()
        assert code == 0, output
        assert [record["step"] for record in read_lines(child.metrics_file)] == STEPS
        newest = around.weights.manifests[-1].weight_version
        published = load_file(around.weights.folder(newest) / "model.safetensors")
    expected = load_file(whole / "weights.safetensors")
    assert all(published[name].equal(expected[name]) for name in expected)


def test_the_trust_region_is_around_the_proximal_policy() -> None:
    """The gradient of min(r A, clip(r) A) times the bounded pi_prox / pi_behaviour, by autograd."""
    rng = torch.Generator().manual_seed(0)
    now, before, behaviour, advantages = (
        torch.randn(4, 50, generator=rng, dtype=torch.float64) * 0.4 for _ in range(4)
    )
    importance = Importance(way="truncate", floor=0.5, cap=1.5, low=0.2, high=0.3)
    found = importance(
        Ratios(
            proximal_log_ratio_BT=now - before,
            log_ratio_BT=now - behaviour,
            advantages_BT=advantages,
            loss_mask_BT=torch.ones(4, 50, dtype=torch.bool),
        )
    )
    leaf = now.clone().requires_grad_()
    ratio = (leaf - before).exp()
    weight = (before - behaviour).exp().clamp(max=1.5)
    objective = weight * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    (gradient,) = torch.autograd.grad(objective.sum(), leaf)
    torch.testing.assert_close(found.weight_BT * advantages, gradient)
    torch.testing.assert_close(found.value_BT * advantages, objective.detach())
    assert (found.weight_BT == 0).any(), "some are clipped"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch__stream_groups": 2}, "stream_groups is 2 with algorithm.num_epochs 2"),
        (
            {"batch__start_at_tail": True, "scheduler": "127.0.0.1:1"},
            "start_at_tail is True with .* set it to False",
        ),
    ],
)
def test_settings_that_need_one_update_are_refused(settings: dict[str, Any], message: str) -> None:
    """It names both."""
    given = {"run_id": "r", "model": "m", "checkpoint__folder": "c", "algorithm__num_epochs": 2}
    with pytest.raises(ValueError, match=message):
        trainer_config(**given, **settings)


def test_an_algorithm_without_a_proximal_policy_takes_one_update() -> None:
    """It names those that take several."""
    given = {"run_id": "r", "model": "m", "checkpoint__folder": "c", "algorithm__num_epochs": 2}
    with pytest.raises(ConfigError, match="rloo has no trust region around the policy"):
        make_algorithm(trainer_config(**given, algorithm__name="rloo"))
    make_algorithm(trainer_config(**given, algorithm__name="decoupled_ppo"))
