"""Learning under lag: what is run, and what is made of it."""

from __future__ import annotations

import random
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from bench.quickstart import lag, seeds
from bench.quickstart.lag import Condition, HeldBack, Outcome
from services.chassis.config.load import load
from services.launcher.config import LauncherConfig
from trainer.algorithms.base import PolicyTokens, make_algorithm
from trainer.config import TrainerConfig

CONFIG = str(Path(__file__).parents[3] / "examples/quickstart/disaggregated.toml")
ON_POLICY = Condition(bound=0, corrected=True)
LAG_1 = Condition(bound=1, corrected=True)


def outcomes(seed: int, count: int = 3, steps: int = 8) -> list[Outcome]:
    """Runs that went anyhow."""
    rng = random.Random(seed)
    return [
        Outcome(
            heldout=rng.random(),
            success=[rng.random() for _ in range(steps)],
            lag=rng.random(),
            token_lag=rng.random(),
        )
        for _ in range(count)
    ]


def off_policy_tokens(seed: int) -> PolicyTokens:
    """Two rows of three tokens, whose probabilities have changed since they were sampled."""
    generator = torch.Generator().manual_seed(seed)
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    drawn = [torch.rand(2, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
    return PolicyTokens(
        logprobs_BT=-drawn[0],
        behaviour_logprobs_BT=-drawn[1],
        reference_logprobs_BT=zeros,
        advantages_BT=torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, 3),
        turn_rewards_BT=zeros,
        weights_BT=zeros + 1,
        staleness_BT=torch.ones(2, 3, dtype=torch.int64),
        loss_mask_BT=torch.ones(2, 3, dtype=torch.bool),
        rollouts_B=torch.tensor([0, 1]),
        groups_B=torch.tensor([0, 0]),
    )


def trainer_config(*given: str) -> TrainerConfig:
    """The quickstart's, with what the environment says."""
    needed = ("--run-id", "r", "--model", "m", "--checkpoint.folder", "c")
    return load(TrainerConfig, "trainer", ["--config", CONFIG, *needed, *given])


def test_at_a_bound_of_0_correction_makes_no_condition() -> None:
    """The others come with it and without."""
    assert [condition.name for condition in lag.conditions([4, 0, 1, 4])] == [
        "on_policy",
        "lag1_corrected",
        "lag1_uncorrected",
        "lag4_corrected",
        "lag4_uncorrected",
    ]


@pytest.mark.parametrize("rounds", [2, 3, 7])
def test_no_condition_is_always_last(rounds: int) -> None:
    """Each round has all of them, and another one at its end."""
    every = lag.conditions([0, 1, 4, 8])
    found = [lag.in_turn(every, place, rounds) for place in range(rounds)]
    assert found[0] == every
    assert all(set(order) == set(every) and len(order) == len(every) for order in found)
    assert len({order[-1] for order in found}) == rounds


def test_a_condition_reaches_the_run_and_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings exist, and mean what the condition says."""
    condition = Condition(bound=8, corrected=False)
    for name, value in lag.settings(condition, steps=12, learning_rate=0.5).items():
        monkeypatch.setenv(name, value)
    launcher = load(LauncherConfig, "launcher", ["--config", CONFIG])
    assert (launcher.max_staleness, launcher.prepare) == (8, "examples.quickstart.prepare")
    config = trainer_config()
    assert (config.algorithm.importance, config.num_steps, config.optimizer.learning_rate) == (
        "none",
        12,
        0.5,
    )
    assert isinstance(make_algorithm(config), HeldBack)


def test_what_a_run_prepared_is_not_prepared_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next run takes its files, wherever it runs."""
    for name, value in seeds.start_of(tmp_path).items():
        monkeypatch.setenv(name, value)
    config = load(LauncherConfig, "launcher", ["--config", CONFIG])
    assert config.prepare is None
    assert config.model == str(tmp_path / "prepared/model")
    assert config.tasks == str(tmp_path / "prepared/tasks-train.jsonl")
    assert config.heldout_tasks == str(tmp_path / "prepared/tasks-heldout.jsonl")


def test_a_trainer_that_is_held_back_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """DAPO's loss after one sleep, with correction and without; these two are not the same."""
    slept: list[float] = []
    monkeypatch.setattr("bench.quickstart.lag.time.sleep", slept.append)
    tokens, losses = off_policy_tokens(0), []
    for importance in ("truncate", "none"):
        usual = make_algorithm(trainer_config("--algorithm.importance", importance))
        ours = make_algorithm(
            trainer_config(
                "--algorithm.importance",
                importance,
                "--algorithm.name",
                "bench.quickstart.lag:HeldBack",
            )
        )
        losses.append(ours.loss(tokens).loss.item())
        assert losses[-1] == usual.loss(tokens).loss.item()
    assert slept == [lag.HELD_SECONDS] * 2
    assert losses[0] != losses[1]


def test_the_lag_of_a_run_is_what_its_steps_had() -> None:
    """Not its bound."""
    steps = [
        {"reward/success": 0.25, "max_staleness": 0, "staleness_mean": 0.0},
        {"reward/success": 0.75, "max_staleness": 3, "staleness_mean": 1.5},
    ]
    found = lag.outcome({"heldout_after": 0.5}, steps)
    assert found == Outcome(heldout=0.5, success=[0.25, 0.75], lag=1.5, token_lag=0.75)


def test_a_difference_is_of_runs_with_the_same_seed() -> None:
    """Its standard error is that of the pairs, not of either side."""
    runs = {ON_POLICY: outcomes(0), LAG_1: outcomes(1)}
    found = lag.figures(runs)
    pairs = zip(runs[LAG_1], runs[ON_POLICY], strict=True)
    differences = [ours.heldout - theirs.heldout for ours, theirs in pairs]
    error = stdev(differences) / sqrt(3)
    assert found["lag1_minus_on_policy"] == pytest.approx(fmean(differences))
    assert found["lag1_minus_on_policy_standard_error"] == pytest.approx(error)
    deviation = stdev(each.heldout for each in runs[ON_POLICY])
    assert found["on_policy_deviation"] == found["on_policy.heldout_after_deviation"] == deviation
    assert found["lag1_corrected.lag"] == pytest.approx(fmean(each.lag for each in runs[LAG_1]))


def test_nothing_is_said_of_what_was_not_run() -> None:
    """One seed has no deviation, and without on-policy runs there is no difference."""
    alone = lag.figures({ON_POLICY: outcomes(0, count=1), LAG_1: outcomes(1, count=1)})
    assert "lag1_minus_on_policy" in alone
    assert not [name for name in alone if "deviation" in name or "error" in name]
    assert "lag1_minus_on_policy" not in lag.figures({LAG_1: outcomes(1)})


def test_a_curve_is_the_mean_of_runs_and_of_the_newest_steps() -> None:
    """Of as many as there are, at the beginning."""
    rising = [float(step) for step in range(8)]
    runs = [
        Outcome(heldout=0.0, success=[value + more for value in rising], lag=0.0, token_lag=0.0)
        for more in (0.0, 2.0)
    ]
    assert lag.curve(runs) == [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("count", [1, 3])
def test_all_conditions_are_drawn(count: int, tmp_path: Path) -> None:
    """A picture comes of one seed, and of several."""
    every = lag.conditions([0, 1, 4])
    runs = {condition: outcomes(seed, count) for seed, condition in enumerate(every)}
    lag.draw(tmp_path / "lag.png", runs)
    assert (tmp_path / "lag.png").stat().st_size > 0
