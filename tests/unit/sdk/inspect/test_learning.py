"""Each rule names its cause with number and cure, and is silent about runs that learn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from seamflow.inspect.learning import not_learning
from seamflow.inspect.lives import Restart
from seamflow.inspect.progress import WINDOW, Progress, read_progress, with_counts
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb

HEALTHY: Mapping[str, Any] = {
    "reward_mean": 0.4,
    "reward_std": 0.2,
    "share_equal_groups": 0.1,
    "completion_tokens_mean": 50.0,
    "share_cut": 0.1,
    "reward_cut_mean": 0.35,
    "num_tokens": 900,
    "grad_norm": 0.7,
    "grad_scale": 1.0,
    "entropy": 1.5,
    "train_rollout_logprob_abs_diff": 0.02,
    "num_samples": 32,
    "num_rollouts": 32,
    "num_groups": 4,
}


def steps(count: int = WINDOW, **changes: Any) -> list[dict[str, Any]]:
    """Steps of one kind, whose rewards rise a little unless they are given."""
    return [
        {**HEALTHY, "step": i, "reward_mean": 0.4 + i / 100, **changes} for i in range(1, count + 1)
    ]


BAD: Mapping[str, Progress] = {
    "rewards_equal": Progress(
        steps=steps(reward_mean=0.0, reward_std=0.0, share_equal_groups=1.0, grad_norm=0.0)
    ),
    "no_reward_differences": Progress(steps=steps(share_equal_groups=1.0, grad_norm=0.0)),
    "answers_cut": Progress(steps=steps(share_cut=0.8, reward_cut_mean=0.05)),
    "no_trainable_tokens": Progress(steps=steps(grad_norm=None, grad_scale=None)),
    "gradient_zero": Progress(steps=steps(grad_norm=0.0)),
    "gradient_scaled_away": Progress(steps=steps(grad_norm=5e4, grad_scale=2e-5)),
    "logprobs_apart": Progress(steps=steps(2, train_rollout_logprob_abs_diff=78447.0)),
    "entropy_collapsed": Progress(
        steps=[*steps(), *steps(entropy=1e-4, reward_mean=0.1)],
    ),
    "length_collapsed": Progress(
        steps=[*steps(), *steps(completion_tokens_mean=2.0, reward_mean=0.1)],
    ),
    "heldout_below_start": Progress(
        steps=steps(),
        evaluations=[
            {"step": 0, "mean": 0.5, "interval": [0.4, 0.6]},
            {"step": 3, "mean": 0.3, "interval": [0.2, 0.4]},
        ],
    ),
    "process_restarted": Progress(
        steps=steps(), restarts=[Restart(name="trainer", reason="signal 9", time=1.0)]
    ),
    "reward_without_success": Progress(
        steps=[
            {**step, "reward_mean": i / 10, "reward/success": 0.1 - i / 100}
            for i, step in enumerate(steps(10))
        ]
    ),
    "tasks_fail": Progress(steps=steps(), num_failed=30, num_tried=50),
}


@pytest.mark.parametrize("rule", BAD)
def test_each_way_not_to_learn_has_one_name_and_a_cure(rule: str) -> None:
    """And no other rule blames something else."""
    found = not_learning(BAD[rule])
    assert [each.rule for each in found] == [rule]
    assert any(letter.isdigit() for letter in found[0].sentence)
    assert found[0].cure


@pytest.mark.parametrize("rule", BAD)
def test_a_rule_is_silent_when_it_is_over(rule: str) -> None:
    """Healthy steps, a good evaluation and no failures afterwards."""
    bad = BAD[rule]
    better = [*bad.evaluations, {"step": 9, "mean": 0.6, "interval": [0.5, 0.7]}]
    over = Progress(steps=[*bad.steps, *steps()], evaluations=better, num_failed=30, num_tried=999)
    assert not_learning(over) == []


@pytest.mark.parametrize("rule", BAD)
def test_one_odd_step_is_no_finding(rule: str) -> None:
    """Except for what is not told by steps."""
    if rule not in ("heldout_below_start", "tasks_fail", "logprobs_apart"):
        odd = Progress(steps=[*steps(), BAD[rule].steps[-1], *steps(1)])
        assert not_learning(odd) == []


def test_a_run_that_has_solved_its_tasks_is_healthy() -> None:
    """Equal rewards, no gradient and no entropy are what is left when all answers are right."""
    nothing: dict[str, Any] = {
        "reward_std": 0.0,
        "share_equal_groups": 1.0,
        "grad_norm": 0.0,
        "entropy": 0.0,
    }
    solved = steps(4, reward_mean=1.0, completion_tokens_mean=3.0, **nothing)
    assert not_learning(Progress(steps=[*steps(), *solved])) == []
    worse = steps(4, reward_mean=0.0, **nothing)
    assert {each.rule for each in not_learning(Progress(steps=[*steps(), *worse]))} == {
        "rewards_equal",
        "entropy_collapsed",
    }


def test_answers_that_always_end_at_the_limit_are_healthy() -> None:
    """If the reward rises, or cut answers earn as much as whole ones; *control*: a flat reward."""
    assert not_learning(Progress(steps=steps(share_cut=1.0, reward_cut_mean=0.4))) == []
    assert not_learning(Progress(steps=steps(share_cut=0.9, reward_cut_mean=0.41))) == []
    equal: dict[str, Any] = {"reward_mean": 0.0, "reward_cut_mean": 0.0, "reward_std": 0.0}
    for flat in (equal, {"reward_mean": 0.4, "reward_cut_mean": 0.4}):
        found = not_learning(Progress(steps=steps(share_cut=1.0, **flat)))
        assert found[0].rule == "answers_cut"


def test_cut_answers_whose_reward_rises_without_success_are_named() -> None:
    """*Control*: with success that rises they end where they should."""
    told = ["answers_cut"]
    for share, first, last, rules in (
        (1.0, 0.1, 0.1, told),
        (1.0, 0.1, 0.3, []),
        (0.95, 0.0, 0.0, told),
        (0.95, 0.1, 0.1, []),
    ):
        cut = steps(share_cut=share, reward_cut_mean=0.41)
        for step, value in zip(cut, (first, first, last), strict=True):
            step["reward/success"] = value
        assert [each.rule for each in not_learning(Progress(steps=cut))] == rules


def test_a_few_whole_answers_are_no_sample() -> None:
    """Chance made one in twenty of them better; *control*: one in five."""
    for share, rules in ((0.96, []), (0.8, ["answers_cut"])):
        cut = Progress(steps=steps(share_cut=share, reward_cut_mean=0.35 if share < 0.9 else 0.405))
        assert [each.rule for each in not_learning(cut)] == rules


@pytest.mark.parametrize(("after", "rules"), [(0.0, ["reward_without_success"]), (0.3, [])])
def test_evaluations_tell_reward_from_success(after: float, rules: list[str]) -> None:
    """The mean of a partial reward rose while pass@1 fell; *control*: both rose."""
    lines = [
        {"step": 0, "metric": "reward", "mean": 0.077, "interval": [0.05, 0.1]},
        {"step": 10, "metric": "reward", "mean": 0.3, "interval": [0.25, 0.35]},
    ]
    rates = ({"pass_at": {"1": rate}} for rate in (0.021, after))
    both = [line | rate for line, rate in zip(lines, rates, strict=True)]
    found = not_learning(Progress(steps=steps(), evaluations=both))
    assert [each.rule for each in found] == rules
    if found:
        assert "from 0.077 to 0.300" in found[0].sentence
        assert "from 2.1% to 0.0%" in found[0].sentence


def test_a_restart_is_over_after_three_steps() -> None:
    """*Control*: one within the last three is told."""
    timed = [{**step, "time": 10.0 * i} for i, step in enumerate(steps(6))]
    for time, rules in ((15.0, []), (25.0, ["process_restarted"])):
        restart = Restart(name="trainer", reason="signal 9", time=time)
        found = not_learning(Progress(steps=timed, restarts=[restart]))
        assert [each.rule for each in found] == rules


def test_a_metric_to_be_minimised_is_worse_above_its_start() -> None:
    """Goal min of [evaluation]."""
    lines = [
        {"step": 0, "mean": 0.5, "goal": "min", "interval": [0.4, 0.6]},
        {"step": 3, "mean": 0.8, "goal": "min", "interval": [0.7, 0.9]},
    ]
    found = not_learning(Progress(steps=[], evaluations=lines))
    assert [each.rule for each in found] == ["heldout_below_start"]
    assert not_learning(Progress(steps=[], evaluations=lines[::-1])) == []


def test_groups_that_are_discarded_never_reach_a_step() -> None:
    """Those of three steps without one between them are a finding, fewer are not."""
    ready = sample_pb.Readiness(groups_per_step=4)
    nothing = Progress(steps=[])
    assert not_learning(with_counts(nothing, ready, 11)) == []
    (found,) = not_learning(with_counts(nothing, ready, 12))
    assert found.rule == "no_reward_differences"
    assert "12 groups" in found.sentence


def test_failures_are_compared_with_all_rollouts_that_were_begun() -> None:
    """A group of the last step has eight rollouts."""
    ready = sample_pb.Readiness(num_replaced_samples=10, num_admitted_groups=10)
    assert with_counts(Progress(steps=steps()), ready).num_tried == 90
    assert with_counts(Progress(steps=steps()), None).num_tried == 0


def test_progress_is_read_from_files_that_are_being_written(tmp_path: Path) -> None:
    """A repeated step counts once; evaluations without a result and cut lines are left out."""
    lines = [{"step": 2, "loss": 1.0}, {"step": 1}, {"step": 2, "loss": 0.5}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "lo')
    (tmp_path / "evaluation.jsonl").write_text('{"mean": null}\n{"mean": 0.5}\n')
    found = read_progress(tmp_path)
    assert [step.get("loss") for step in found.steps] == [None, 0.5]
    assert found.evaluations == [{"mean": 0.5}]
    assert not read_progress(tmp_path / "none").steps


def test_groups_without_differences_are_found_at_the_best_reward_too() -> None:
    """Where tasks differ some are not solved: the policy has collapsed on its way."""
    stuck = steps(4, reward_mean=0.7, reward_std=0.4, share_equal_groups=1.0, grad_norm=0.0)
    found = not_learning(Progress(steps=[*steps(), *stuck]))
    assert [each.rule for each in found] == ["no_reward_differences"]


def test_one_step_is_enough_for_a_distance_beyond_reason() -> None:
    """A policy that diverges is far from its rollouts once, and then says one thing for ever."""
    jump = steps(1, train_rollout_logprob_abs_diff=160926.0)
    assert [f.rule for f in not_learning(Progress(steps=[*steps(), *jump]))] == ["logprobs_apart"]
