"""The check of a resumed run's figures finds each one that is shown wrongly."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from tests.suites.health.recomputed import Figures, differing, recomputed, shown

LIVES = (
    *(("started", 0), ("learning", 10), ("stopping", 50), ("stopped", 55)),
    *(("started", 100), ("learning", 110), ("killed", 150)),
    *(("started", 200), ("learning", 210), ("restarted", 220), ("learned", 230)),
)
CLASSES = {60: tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE, 225: tokens_pb2.FAILURE_CLASS_ENVIRONMENT}


def folder_of(tmp_path: Path) -> Path:
    """An ended run of three lives and eight steps."""
    folder = tmp_path / "runs" / "resumed"
    (folder / "logs").mkdir(parents=True)
    (folder / "addresses.json").write_text('{"run_id": "resumed"}')
    steps = [
        {
            "step": i,
            "reward_mean": i / 10,
            "num_tokens": 100,
            "weight_version": i,
            "max_staleness": 1,
            "time": 10.0 + i,
        }
        for i in range(1, 9)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    lines = [{"state": state, "time": time} for state, time in (*LIVES, ("finished", 240))]
    (folder / "lives.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "timeline.png").touch()
    os.utime(folder / "timeline.png", (238, 238))
    seconds = {"seconds_learning": 100.0, "seconds_total": 143.0}
    counts = {"lives": 3, "optimizer_steps": 8, "weight_updates": 8, "max_staleness_seen": 1}
    counts |= {"rollouts": 1, "turns": 0, "tokens_recorded": 0, "process_restarts": 1}
    counts |= {"failed_rollouts": 1, "cancelled_rollouts": 1, "infrastructure_failures": 0}
    rewards = {"reward_first": 0.2, "reward_last": 0.7, "trained_tokens_per_second": 8.0}
    (folder / "summary.json").write_text(json.dumps({**counts, **rewards, **seconds}))
    return folder


@pytest.fixture(name="figures")
def _figures(tmp_path: Path) -> tuple[Figures, Figures]:
    """What is shown, and what is true."""
    folder = folder_of(tmp_path)
    done = trajectory_pb2.Trajectory(rewards=tokens_pb2.Rewards())
    stored = [done]
    for time, kind in CLASSES.items():
        failed = trajectory_pb2.Trajectory(failure=tokens_pb2.Failure(failure_class=kind))
        failed.finish_time.FromSeconds(time)
        stored.append(failed)
    return shown(folder), recomputed(folder, stored)


def test_true_figures_do_not_differ(figures: tuple[Figures, Figures]) -> None:
    """Over all lives; what failed while the run was stopped is no failure."""
    assert differing(*figures) == []


def test_whichever_figure_is_changed_is_found(figures: tuple[Figures, Figures]) -> None:
    """*Control*: also one that is missing."""
    said, true = figures
    for name in said:
        (found,) = differing({**said, name: said[name] * 1.1 + 3.0}, true)
        assert found.startswith(f"{name}: ")
        assert differing({k: v for k, v in said.items() if k != name}, true) == [name]
