"""The summary begins with what was learned, and cuts no path."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.launcher.phases.run_summary import failure_lines, learned
from services.launcher.report.summary import show_summary
from services.lib.evaluation import EvaluationConfig, EvaluationLine
from tests.lib.launcher.support import make_trajectory

STEPS = [{"step": i, "reward_mean": i / 10, "num_tokens": 100} for i in range(1, 11)]


def evaluated(*lines: tuple[int, float, bool, str | None]) -> list[EvaluationLine]:
    """Evaluations as (step, mean, is best, checkpoint)."""
    return [
        EvaluationLine(
            label="x",
            step=step,
            weight_version=step,
            metric="success",
            num_tasks=8,
            num_rollouts=8,
            mean=mean,
            is_best=is_best,
            checkpoint=checkpoint,
        )
        for step, mean, is_best, checkpoint in lines
    ]


def test_reward_best_and_speed_are_told(tmp_path: Path) -> None:
    """First and last are means of three steps; the best has step, value and folder."""
    log = evaluated((0, 0.2, True, None), (5, 0.9, True, "/c/best"), (9, 0.8, False, None))
    found = learned(STEPS, log, EvaluationConfig(), 10.0)
    assert (found["reward_first"], found["reward_last"]) == (0.2, 0.9)
    assert [found[f"heldout_{name}"] for name in ("before", "best", "after")] == [0.2, 0.9, 0.8]
    assert (found["best_step"], found["best_checkpoint"]) == (5, "/c/best")
    assert (found["best_note"], found["trained_tokens_per_second"]) == ("", 100.0)


@pytest.mark.parametrize(
    ("lines", "settings", "words"),
    [
        ((), {}, "nothing was evaluated"),
        (((0, 0.2, True, None), (5, 0.1, False, None)), {}, "no evaluation was better"),
        (((0, 0.2, True, None), (5, 0.3, True, None)), {"keep_best": False}, "keep_best is false"),
        (((0, 0.2, True, None), (5, 0.3, True, None)), {}, "let trainer.checkpoint.every divide"),
    ],
)
def test_a_missing_best_checkpoint_has_a_reason(
    tmp_path: Path, lines: tuple[Any, ...], settings: dict[str, Any], words: str
) -> None:
    """One sentence each."""
    log = evaluated(*lines)
    note = learned(STEPS, log, EvaluationConfig(**settings), 1.0)["best_note"]
    assert words in str(note)


def test_first_and_last_steps_never_overlap() -> None:
    """Of four steps they are two and two."""
    rewards = [0.0, 0.2, 0.6, 1.0]
    steps = [{"reward_mean": each, "num_tokens": 1} for each in rewards]
    found = learned(steps, [], EvaluationConfig(), 1.0)
    assert (found["reward_first"], found["reward_last"]) == (0.1, 0.8)
    assert learned(steps[:1], [], EvaluationConfig(), 1.0)["reward_last"] is None


@pytest.mark.parametrize(("metric", "shown"), [("success", "90.0%"), ("reward", "0.900")])
def test_a_mean_reward_is_no_percentage(metric: str, shown: str) -> None:
    """Only what counts successes is one."""
    log = [replace(each, metric=metric) for each in evaluated((5, 0.9, True, None))]
    log = [replace(each, pass_at={"1": 0.02}) for each in log]
    summary = {"run": "r", "lives": 2, "optimizer_steps": 9, "health": [], "failures": []}
    summary |= {**learned(STEPS, log, EvaluationConfig(), 10.0), "nodes": {}}
    summary |= {"mechanisms": {}, "turns": 7, "cores_busy": "1 of 2", "weight_updates": 8}
    console = Console(width=100, file=io.StringIO(), record=True)
    show_summary(summary, Path("/run"), console)
    text = console.export_text()
    assert f"best {shown} at step 5" in text and f"held-out {metric}" in text
    assert ("held-out pass@1 (reward > 0.5)" in text) == (metric == "reward")
    assert "in all lives" in text and "cores_busy, since start 2" in text
    assert "weights were published 8 times in 9 optimizer steps" in text


def test_failures_have_their_cause() -> None:
    """Equal ones count together."""
    failed = {
        "state": trajectory_pb2.ROLLOUT_STATE_FAILED,
        "failure": tokens_pb2.Failure(
            failure_class=tokens_pb2.FAILURE_CLASS_ENVIRONMENT, message="KeyError('b')"
        ),
    }
    (line,) = failure_lines([make_trajectory(**failed), make_trajectory(**failed)])
    assert line.startswith("2 × failure ENVIRONMENT")
    assert "KeyError('b')" in line
    late = make_trajectory(**failed)
    late.finish_time.FromSeconds(150)
    assert failure_lines([late], [(100.0, 200.0)]) == [], "a stop cut it off"
    assert failure_lines([late], [(160.0, 200.0)]) != []


def test_the_first_table_is_of_learning_and_no_path_is_cut(tmp_path: Path) -> None:
    """However narrow the terminal is."""
    path = "/very/long" * 20 + "/checkpoints/best"
    log = evaluated((0, 0.2, True, None), (5, 0.9, True, path))
    summary = {
        "run": "r",
        "lives": 1,
        "optimizer_steps": len(STEPS),
        **learned(STEPS, log, EvaluationConfig(), 10.0),
        "health": ["All rewards are 0. Check."],
        "failures": ["2 × failure"],
        "turns": 7,
        "mechanisms": {"steps_begun_early": 3},
        "nodes": {"node-a": {"idle": 0.5, "rollout": 0.5, "switch_seconds": {"": 0.1}}},
    }
    console = Console(width=50, file=io.StringIO(), record=True)
    show_summary(summary, Path("/runs" * 30), console)
    text = console.export_text()
    assert path in text
    assert "/runs" * 30 in text
    assert text.index("0.200 → 0.900") < text.index("health: All rewards") < text.index("turns")
    assert "steps_begun_early" in text and "switch to none" not in text
