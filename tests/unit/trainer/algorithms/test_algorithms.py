"""Each algorithm against its paper's objective (`formulas.py`), by micro-batches and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from services.chassis.errors import ConfigError
from tests.lib.trainer.ranks.gradients import config, greatest_error, make_case, ours, rollouts_of
from tests.suites.algorithms.formulas import (
    BETA,
    HIGH,
    LENGTH,
    LOW,
    OBJECTIVES,
    differences,
    distances,
    group_relative,
    grpo,
    grpo_near_reference,
)
from trainer.algorithms.base import make_algorithm
from trainer.config.optimization import ALGORITHMS


def test_every_algorithm_has_a_reference() -> None:
    """None can be added without one."""
    assert set(OBJECTIVES) == set(ALGORITHMS)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algorithm", sorted(OBJECTIVES))
def test_gradient_equals_the_papers_objective(algorithm: str, seed: int) -> None:
    """To 1e-6 on ragged batches of mixed versions, and so does the loss."""
    samples, logits = make_case(seed)
    rollouts, found = rollouts_of(samples, logits), {"loss": 0.0}
    expected = differences(OBJECTIVES[algorithm], rollouts)
    gradient = ours(samples, logits, config(algorithm), sums=found)
    assert greatest_error(gradient, expected) < 1e-6
    objective = OBJECTIVES[algorithm](rollouts, [rollout.start for rollout in rollouts])
    assert found["loss"] == pytest.approx(-objective, rel=1e-6)


@pytest.mark.parametrize("algorithm", sorted(OBJECTIVES))
def test_reference_distinguishes_algorithms(algorithm: str) -> None:
    """Negative control: no other one's gradient passes for it."""
    samples, logits = make_case(0)
    expected = differences(OBJECTIVES[algorithm], rollouts_of(samples, logits))
    for other in set(OBJECTIVES) - {algorithm}:
        assert greatest_error(ours(samples, logits, config(other)), expected) > 1e-3


@pytest.mark.parametrize("algorithm", sorted(OBJECTIVES))
def test_gradient_depends_neither_on_micro_batches_nor_on_order(algorithm: str) -> None:
    """One batch or many, forwards or backwards: equal to rounding."""
    samples, logits = make_case(1)
    whole = ours(samples, logits, config(algorithm), budget=10_000)
    for budget, step in ((1, 1), (40, -1)):
        other = ours(samples[::step], logits[::step], config(algorithm), budget)
        assert greatest_error(other[::step], whole) < 1e-12


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_distance_from_the_reference_is_in_the_loss(estimator: str) -> None:
    """GRPO with its KL term, by either estimator; without the term it is another objective."""
    samples, logits = make_case(0)
    rollouts = rollouts_of(samples, logits)
    expected = differences(grpo_near_reference(estimator), rollouts)
    loss = {"loss": 0.0}
    settings = config("grpo", kl__loss=BETA, kl__estimator=estimator)
    assert greatest_error(ours(samples, logits, settings, sums=loss), expected) < 1e-6
    objective = grpo_near_reference(estimator)(rollouts, [r.start for r in rollouts])
    assert loss["loss"] == pytest.approx(-objective, rel=1e-6)
    assert greatest_error(differences(grpo, rollouts), expected) > 1e-3


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_distance_from_the_reference_is_in_the_reward(estimator: str) -> None:
    """As the rollout was sampled, summed over its tokens."""
    samples, logits = make_case(0)
    rollouts = rollouts_of(samples, logits)
    for rollout in rollouts:
        far = distances(rollout.behaviour, rollout.reference, estimator).sum()
        rollout.reward -= BETA * far
    expected = differences(grpo, rollouts)
    found = ours(samples, logits, config("grpo", kl__reward=BETA, kl__reward_estimator=estimator))
    assert greatest_error(found, expected) < 1e-6


def test_distance_from_the_reference_is_reported() -> None:
    """By the least noisy estimator, with or without a term."""
    samples, logits = make_case(0)
    found = {"reference_kl": 0.0}
    ours(samples, logits, config("dapo"), sums=found)
    rollouts = rollouts_of(samples, logits)
    expected = sum(distances(r.start, r.reference, "k3").sum() for r in rollouts)
    assert found["reference_kl"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kl__loss": 0.1, "algorithm__reference_column": ""},
            "kl.loss is 0.1 but algorithm.reference_column is",
        ),
        (
            {"kl__reward": 0.1, "algorithm__reference_column": ""},
            "kl.reward is 0.1 but .* give the column",
        ),
        ({"kl__loss": 0.1, "kl__estimator": "k1"}, r"kl.estimator is 'k1' .* use k2"),
    ],
)
def test_a_kl_term_without_reference_is_rejected(settings: dict[str, object], message: str) -> None:
    """The message names the setting, the value and the cure."""
    with pytest.raises(ValueError, match=message):
        config("grpo", **settings)


def test_distillation_needs_a_teacher() -> None:
    """The message names the setting and the cure."""
    with pytest.raises(ConfigError, match="reference_column is not set: give the column"):
        make_algorithm(config("distillation", algorithm__reference_column=""))


@pytest.mark.parametrize(
    ("way", "weight"),
    [
        ("truncate", lambda rho: np.minimum(rho, 2.0)),
        ("mask", lambda rho: rho * (rho <= 2.0)),
        ("icepop", lambda rho: rho * ((rho >= 0.5) & (rho <= 2.0))),
        ("none", np.ones_like),
    ],
)
@pytest.mark.parametrize("algorithm", ["decoupled_ppo", "dapo"])
def test_importance_of_each_token_is_bounded_as_configured(
    algorithm: str, way: str, weight: Callable[[np.ndarray], np.ndarray]
) -> None:
    """It multiplies the token's gradient, within the trust region if there is one."""
    samples, logits = make_case(2)
    rollouts = rollouts_of(samples, logits)
    num_tokens = sum(len(r.start) for r in rollouts)
    expected = []
    for r in rollouts:
        rho, advantage = np.exp(r.start - r.behaviour), group_relative(r, rollouts)
        outside = rho > 1 + HIGH if advantage > 0 else rho < 1 - LOW
        kept = ~outside if algorithm == "dapo" and way != "none" else np.ones_like(rho)
        expected.append(weight(rho) * kept * advantage / num_tokens)
    settings = config(
        algorithm,
        algorithm__importance=way,
        algorithm__importance_cap=2.0,
        algorithm__importance_floor=0.5,
    )
    assert greatest_error(ours(samples, logits, settings), expected) < 1e-9


def test_tokens_of_older_weights_weigh_less() -> None:
    """By the versions of each span, not of the sample."""
    samples, logits = make_case(0)
    plain = ours(samples, logits, config("dapo"))
    decayed = ours(samples, logits, config("dapo", algorithm__staleness_decay=0.5))
    seen = set()
    for sample, one, other in zip(samples, plain, decayed, strict=True):
        versions = [
            span.weight_version for span in sample.tokens.spans for _ in range(span.num_tokens)
        ]
        behind = [2 - v for v, t in zip(versions, sample.loss_mask, strict=True) if t]
        behind = behind[len(behind) - len(one) :]  # the first token of all is never trained
        np.testing.assert_allclose(other, one * 0.5 ** np.array(behind), rtol=1e-12)
        seen |= set(behind)
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("way", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_any_algorithm_takes_any_weights_of_tokens(way: str) -> None:
    """DAPO as weighted by the others is what their weights make of it."""
    samples, logits = make_case(1)
    rollouts = rollouts_of(samples, logits)
    scales: dict[str, Callable[[int], float]] = {
        "token_mean": lambda n: 1 / sum(len(r.start) for r in rollouts),
        "sequence_mean": lambda n: 1 / (n * len(rollouts)),
        "sequence_sum": lambda n: 1 / len(rollouts),
        "constant": lambda n: 1 / (LENGTH * len(rollouts)),
    }
    plain = ours(samples, logits, config("dapo", algorithm__loss_aggregation="token_mean"))
    total = sum(len(r.start) for r in rollouts)
    expected = [each * total * scales[way](len(each)) for each in plain]
    assert (
        greatest_error(
            ours(samples, logits, config("dapo", algorithm__loss_aggregation=way)), expected
        )
        < 1e-12
    )


@pytest.mark.parametrize(
    ("settings", "counted"),
    [
        (
            {"algorithm__importance_cap": 2.0},
            lambda rho: (0, (rho > 2).sum()),
        ),
        ({"algorithm__importance": "none"}, lambda rho: (0, 0)),
        (
            {
                "algorithm__importance": "mask",
                "algorithm__importance_cap": 2.0,
            },
            lambda rho: ((rho > 2).sum(), 0),
        ),
        ({"algorithm": "gspo"}, None),
    ],
)
def test_tokens_that_were_left_out_or_held_back_are_counted(
    settings: dict[str, Any], counted: Callable[[np.ndarray], tuple[int, int]] | None
) -> None:
    """By the ratio that the algorithm goes by: of GSPO's sequences none is held back."""
    samples, logits = make_case(2)
    rho = np.concatenate([np.exp(r.start - r.behaviour) for r in rollouts_of(samples, logits)])
    found = {"clip_fraction": 0.0, "cap_fraction": 0.0}
    ours(samples, logits, config(**({"algorithm": "decoupled_ppo"} | settings)), sums=found)
    if counted is None:
        assert found["clip_fraction"] > 0
        assert found["cap_fraction"] == 0
    else:
        assert (found["clip_fraction"], found["cap_fraction"]) == counted(rho)


def test_each_algorithm_has_a_default_clip_range() -> None:
    """GSPO's is a thousand times smaller; what is configured holds for any."""
    plain = {"algorithm__clip_low": None, "algorithm__clip_high": None}
    regions = {
        name: make_algorithm(config(name, **plain)).importance  # type: ignore[attr-defined]
        for name in ("dapo", "grpo", "gspo")
    }
    assert (regions["dapo"].low, regions["dapo"].high) == (0.2, 0.28)
    assert (regions["grpo"].low, regions["grpo"].high) == (0.2, 0.2)
    assert (regions["gspo"].low, regions["gspo"].high) == (3e-4, 4e-4)
    assert make_algorithm(config("grpo")).importance.high == HIGH  # type: ignore[attr-defined]


def test_a_bound_without_effect_is_rejected() -> None:
    """The message names the setting, the value and the cure."""
    with pytest.raises(ConfigError, match="importance is 'mask': cispo truncates"):
        make_algorithm(config("cispo", algorithm__importance="mask"))
    with pytest.raises(ValueError, match=r"importance_cap is 0.4: give a number above"):
        config("dapo", algorithm__importance_cap=0.4)


def test_a_constant_length_has_to_be_given() -> None:
    """The message names the setting and the cure."""
    with pytest.raises(ConfigError, match=r"algorithm.loss_length is 0.*give the maximum"):
        make_algorithm(config("dr_grpo", algorithm__loss_length=0))
