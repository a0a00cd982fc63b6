"""Figures are counted from records."""

from __future__ import annotations

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.launcher.report.summary import (
    TrajectoryFigures,
    num_weight_updates,
    tail_ratio,
)
from tests.lib.launcher.support import make_trajectory, make_turn


def test_a_turn_of_two_versions_or_two_servers_was_interrupted() -> None:
    """One version on one server is not an interruption."""
    figures = TrajectoryFigures()
    figures.add(make_trajectory(make_turn(([5], 1, "a"), ([6], 2, "a"))))
    figures.add(make_trajectory(make_turn(([5], 1, "a"), ([6], 1, "b"))))
    figures.add(make_trajectory(make_turn(([5], 1, "a"), ([6], 1, "a"))))
    assert (figures.turns_interrupted, figures.turns_resumed) == (2, 2)
    assert (figures.num_turns, figures.tokens_recorded) == (3, 6)


def test_an_unfinished_turn_was_not_resumed() -> None:
    """It was cut and never completed."""
    turn = make_turn(([5], 1, "a"), ([6], 2, "a"))
    turn.finish_reason = tokens_pb2.FINISH_REASON_UNSPECIFIED
    figures = TrajectoryFigures()
    figures.add(make_trajectory(turn, state=trajectory_pb2.ROLLOUT_STATE_FAILED))
    assert (figures.turns_interrupted, figures.turns_resumed) == (1, 0)


def test_failures_are_counted_and_not_measured() -> None:
    """A failed rollout counts as such and leaves no length behind."""
    figures = TrajectoryFigures()
    for kind in (tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE, tokens_pb2.FAILURE_CLASS_ENVIRONMENT):
        failure = tokens_pb2.Failure(failure_class=kind)
        failed = trajectory_pb2.ROLLOUT_STATE_FAILED
        figures.add(make_trajectory(state=failed, failure=failure))
    cancelled = tokens_pb2.Failure(failure_class=tokens_pb2.FAILURE_CLASS_CANCELLED)
    figures.add(make_trajectory(state=failed, failure=cancelled))
    figures.add(make_trajectory(make_turn(([5], 1, "a"))))
    assert (figures.failed_rollouts, figures.infrastructure_failures) == (2, 1)
    assert figures.cancelled_rollouts == 1
    assert figures.rollout_lengths == {"": [1]}


def test_lengths_are_kept_apart_by_evaluation() -> None:
    """Held-out rollouts before and after are not mixed with training."""
    figures = TrajectoryFigures()
    held_out = {"purpose": tokens_pb2.PURPOSE_EVAL, "group_id": "task-1@before"}
    figures.add(make_trajectory(make_turn(([5, 6], 0, "a")), **held_out))
    figures.add(make_trajectory(make_turn(([5], 1, "a"))))
    assert figures.turn_lengths == {"before": [2], "": [1]}


def test_tail_ratio_is_p99_over_median() -> None:
    """99 short outputs and some long ones."""
    assert tail_ratio([10] * 97 + [80] * 3) == pytest.approx(8.0)
    assert tail_ratio([]) == 0


def test_a_step_restored_from_a_checkpoint_has_no_version() -> None:
    """The trainer writes the checkpoint, and the record in it, before it begins the publish."""
    steps = [{"step": 1, "weight_version": 1}, {"step": 2}, {"step": 3, "weight_version": 4}]
    assert num_weight_updates(steps) == 2
