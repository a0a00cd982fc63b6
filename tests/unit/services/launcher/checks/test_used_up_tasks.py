"""When no task is left for another step, and whether there are enough at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from seamflow.inspect.snapshot import Snapshot
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb

from services.launcher.checks.run_settings import amount_of_tasks
from services.launcher.config import LauncherConfig
from services.launcher.phases.training import UsedUpTasks


def snapshot(state: str = "WAITING", step: int = 3, **counts: Any) -> Snapshot:
    """A run with eight groups a step."""
    return Snapshot(
        readiness=sample_pb.Readiness(groups_per_step=8, leased_step=3, **counts),
        nodes=(),
        trainer=trainer_pb.GetStatusResponse(
            state=trainer_pb.TrainerState.Value(f"TRAINER_STATE_{state}"), step=step
        ),
        servers=(),
    )


def test_a_trainer_that_waits_for_what_will_not_come() -> None:
    """Seven groups are ready, and nothing else is under way."""
    used_up = UsedUpTasks(seconds=2.0)
    rest = snapshot(num_ready_groups=7)
    assert [used_up.look(rest, now) for now in (0.0, 1.9, 2.0)] == [False, False, True]


@pytest.mark.parametrize(
    "other",
    [
        snapshot(num_queued_tasks=1),
        snapshot(num_running_rollouts=1),
        snapshot(num_ready_groups=8),
        snapshot("TRAINING"),
        snapshot(step=2),
    ],
    ids=["queued", "running", "ready", "training", "leased"],
)
def test_whatever_goes_on_is_waited_for(other: Snapshot) -> None:
    """And the time counts anew afterwards."""
    used_up, rest = UsedUpTasks(seconds=2.0), snapshot()
    assert not used_up.look(rest, 0.0)
    assert not used_up.look(other, 3.0)
    assert not used_up.look(rest, 4.0)
    assert used_up.look(rest, 6.0)


@pytest.mark.parametrize(
    ("tasks", "epochs", "words"),
    [
        (64, 0, "64 tasks, repeated, for 12 steps of 16 groups of 8 rollouts"),
        (64, 1, "are enough for 4 steps at most: 12 steps"),
        (64, 3, "64 tasks, 3 times each, for 12 steps"),
    ],
)
def test_the_number_of_tasks_is_told_next_to_what_is_needed(
    tmp_path: Path, tasks: int, epochs: int, words: str
) -> None:
    """Before anything starts."""
    file = tmp_path / "train.toml"
    file.write_text("[trainer]\nnum_steps = 12")
    config = LauncherConfig(name="run", model="m", group_size=8, groups_per_step=16)
    found = amount_of_tasks(config, file, {"tasks": tasks, "epochs": epochs})
    assert found is not None
    assert words in found


def test_what_nobody_counted_is_not_told(tmp_path: Path) -> None:
    """Such as a function's tasks."""
    file = tmp_path / "train.toml"
    file.write_text("")
    config = LauncherConfig(name="run", model="m")
    assert amount_of_tasks(config, file, {"tasks": None, "epochs": 1}) is None
