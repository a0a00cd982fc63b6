"""A finding is told when it appears and when it is over, each once."""

from __future__ import annotations

import json
from pathlib import Path

from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb

from services.launcher.report.notes import HealthNotes
from services.launcher.service_clients import connected
from tests.lib.launcher.support import make_config, make_layout


def written(folder: Path, *rewards: float) -> None:
    """Steps with these mean rewards; 0 is that of all rollouts."""
    lines = (
        {"step": i, "reward_mean": reward, "reward_std": float(reward > 0)}
        for i, reward in enumerate(rewards, 1)
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


async def test_a_finding_has_a_line_when_it_appears_and_when_it_ends(tmp_path: Path) -> None:
    """None in between, and none while the trajectory manager is silent."""
    config, ready = make_config(), sample_pb.Readiness(groups_per_step=4)
    async with connected(config, make_layout(config, tmp_path)) as services:
        notes = HealthNotes(tmp_path, services)
        assert await notes.look(ready) == []
        written(tmp_path, 0, 0, 0)
        assert await notes.look(None) == []
        (line,) = await notes.look(ready)
        assert line.startswith("health (rewards_equal): All rewards of the last 3 steps are 0.000")
        written(tmp_path, 0, 0, 0, 0)
        assert await notes.look(ready) == []
        written(tmp_path, 0, 0, 0, 0, 0.5)
        assert await notes.look(ready) == ["health (rewards_equal): over"]
