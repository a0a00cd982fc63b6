"""A whole run: launcher, real processes, torch engine, FSDP trainer, scheduler with lending."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.suites.health.way import Found, is_healthy, run
from tests.suites.health.ways import HEALTHY

pytestmark = pytest.mark.timeout(300)
STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that has ended, and what it left."""

    terminal: Found
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """What it reports."""
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that learns, whose second node is lent whenever the trainer waits; read only."""
    way = replace(
        HEALTHY[0],
        settings=(*HEALTHY[0].settings, "scheduler.lending=always"),
        flags=(*HEALTHY[0].flags, "--nodes", "node-a: rollout,node-b: rollout train"),
    )
    folder = tmp_path_factory.mktemp("whole") / "run"
    return Finished(terminal=run(way, folder), folder=folder / "runs" / "run")


def test_a_run_trains_and_lends_and_loses_nothing(finished: Finished) -> None:
    """Optimizer steps are taken and published, node-b changes sides, every token is recorded."""
    summary = finished.summary
    assert summary["optimizer_steps"] == summary["weight_updates"] == STEPS
    assert summary["node_lendings"] >= 1
    assert summary["node_returns"] >= 1
    received, recorded = summary["tokens_received_by_agents"], summary["tokens_recorded"]
    assert 0 < received <= recorded
    lost = [summary[f"tokens_{what}"] for what in ("lost", "duplicated", "with_wrong_version")]
    assert lost == [0, 0, 0]


def test_each_step_leaves_its_record(finished: Finished) -> None:
    """And the last ones a checkpoint."""
    lines = (finished.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    assert any((finished.folder / "checkpoints").iterdir())


def test_a_run_that_learns_has_no_alarm(finished: Finished) -> None:
    """To its end."""
    assert is_healthy(finished.terminal), finished.terminal


def test_the_console_is_started_and_its_link_is_printed(finished: Finished) -> None:
    """It served to the end without an error; its address and secret stay with the run."""
    addresses = json.loads((finished.folder / "addresses.json").read_text())
    token = (finished.folder / "console_token").read_text()
    terminal = (finished.folder.parents[1] / "terminal.log").read_text()
    assert f"console: http://{addresses['console']}/?token={token}" in terminal
    lines = (finished.folder / "logs" / "console.log").read_text().splitlines()
    levels = {json.loads(line)["level"] for line in lines if line.startswith("{")}
    assert levels == {"info"}
