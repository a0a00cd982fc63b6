"""The checker of `make chaos-environments`, on rollouts made up to hold what it must find."""

from __future__ import annotations

from pathlib import Path

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.environment import Task
from seamflow.trajectory.v1 import trajectory_pb2

from services.environments.episode import episode_seed
from tests.chaos.environments.__main__ import CONTROL, UNDISTURBED, broken, figures_of
from tests.chaos.environments.checker import Verdict, check
from tests.chaos.environments.environment import REWARD, Worker, ended_episodes
from tests.chaos.environments.rig import RunResult

NAMES = ["t0", "t1"]
ENDED = {(task, episode_seed(0, task, f"{task}/{i}/1")) for task in NAMES for i in range(2)}


def scored(rollout_id: str, value: float = REWARD) -> trajectory_pb2.Trajectory:
    """A rollout with a reward."""
    rewards = tokens_pb2.Rewards(rewards=[tokens_pb2.Reward(name="reward", value=value)])
    return trajectory_pb2.Trajectory(rollout_id=rollout_id, rewards=rewards)


def failed(rollout_id: str) -> trajectory_pb2.Trajectory:
    """A rollout that failed."""
    failure = tokens_pb2.Failure(failure_class=tokens_pb2.FAILURE_CLASS_TIMEOUT)
    return trajectory_pb2.Trajectory(rollout_id=rollout_id, failure=failure)


COMPLETE = [failed("t0/0/1"), scored("t0/0/2"), scored("t0/1/1"), scored("t1/0/1")]


@pytest.mark.parametrize(
    ("last", "made_up", "lost"),
    [
        (scored("t1/1/1"), 0, 0),
        (failed("t1/1/1"), 0, 1),
        (scored("t1/1/1", 0.0), 1, 0),
        (scored("t1/5/1"), 1, 0),  # no environment has ended such an episode
    ],
)
def test_made_up_rewards_and_lost_groups_are_counted(
    last: trajectory_pb2.Trajectory, made_up: int, lost: int
) -> None:
    """Against the ledger of the environments."""
    verdict = check([*COMPLETE, last], ENDED, NAMES, 2, REWARD)
    assert (verdict.rewards_from_failures, verdict.groups_lost) == (made_up, lost)
    assert verdict.failures["TIMEOUT"] == 1 + last.HasField("failure")


def test_an_episode_is_in_the_ledger_once_it_has_ended(tmp_path: Path) -> None:
    """Not before."""
    worker = Worker(str(tmp_path), step_seconds=0.0)
    worker.reset(Task(task_id="t", payload={}), 7)
    assert [worker.step({}).done for _ in range(2)] == [False, False]
    assert ended_episodes(tmp_path) == set()
    assert worker.step({}).done
    assert ended_episodes(tmp_path) == {("t", 7)}


def result(made_up: int, rate: float) -> RunResult:
    """Of a run."""
    verdict = Verdict(
        rewards_from_failures=made_up, groups_lost=0, rollouts_finished=8, failures={}
    )
    return RunResult(verdict=verdict, rollouts_per_second=rate, num_kills=1, num_hangs=0)


def test_the_figures_leave_the_control_out_and_require_that_it_fails() -> None:
    """Ratios are those to the undisturbed run."""
    before, after = UNDISTURBED
    results = {before: result(0, 12.0), "killed": result(0, 5.0), after: result(0, 8.0)}
    results[CONTROL] = result(3, 1.0)
    figures = figures_of(results)
    assert figures["killed.throughput_ratio"] == 0.5
    assert figures["rewards_from_failures"] == 0
    assert broken(figures) == []
    assert broken(figures_of({**results, CONTROL: result(0, 1.0)})) == ["negative_controls_failed"]
    assert broken(figures_of({**results, "killed": result(1, 5.0)})) == ["rewards_from_failures"]
