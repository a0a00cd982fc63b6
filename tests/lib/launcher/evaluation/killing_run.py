"""A small run that is evaluated beside training, and what it leaves."""

from __future__ import annotations

import asyncio
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.inspect.snapshot import Snapshot
from seamflow.trajectory.v1 import trajectory_pb2

from services.launcher import redis_server
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout, free_ports
from services.launcher.process_plan import plan
from services.launcher.report.summary import trajectories
from services.launcher.report.view import View
from services.launcher.run import Run
from services.launcher.service_clients import Services
from services.launcher.supervisor import Supervisor
from services.lib.evaluation import EvaluationConfig
from tests.lib.end_to_end.quickstart_files import make_quickstart
from trainer.checkpoint.checkpoint_files import read_parameters

STEPS = 400
CONFIG = """
[launcher]
name = "evaluated"
runs_folder = "{folder}/runs"
model = "{folder}/model"
tasks = "{folder}/tasks.jsonl"
agent = "tests.lib.launcher.evaluation.labelled_agent:LabelledAgent"
nodes = ["node-a: rollout", "node-b: rollout", "node-c: train"]
concurrency = 8
group_size = 2
groups_per_step = 2
lease_seconds = 10

[weights]
# Steps take fractions of a second: a killed server finds its version again.
keep_versions = 1000

[trainer]
num_steps = 400

[trainer.optimizer]
learning_rate = 1e-3

[rollout_server]
# No model: what it samples does not matter here.
engine = "fake"
fake_vocab_size = 16
fake_mean_tokens = 24
fake_step_seconds = 0.005
max_running = 8
max_context = 512

[dataloader]
epochs = 0
"""


class NotingView(View):
    """Keeps what it is told, with the trainer's step at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[int, str]] = []
        self._step = 0

    def note(self, text: str) -> None:
        """Keep the text."""
        super().note(text)
        self.notes.append((self._step, text))

    def show(self, snapshot: Snapshot) -> None:
        """Keep the step."""
        if snapshot.trainer is not None:
            self._step = snapshot.trainer.step


@dataclass(slots=True)
class KillingRun(Run):
    """A run whose held rollout server may be killed in the first evaluation beside training."""

    kills: bool = False

    stored: list[trajectory_pb2.Trajectory] = field(default_factory=list)

    async def _learn(self, processes: Supervisor, services: Services) -> None:
        killing = asyncio.create_task(self._kill(processes))
        try:
            await Run._learn(self, processes, services)
            await asyncio.wait_for(killing, 1.0)
        finally:
            killing.cancel()

    async def _kill(self, processes: Supervisor) -> None:
        if not self.kills:
            return
        running = self.layout.folder / "evaluation.running.json"
        while not running.is_file():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.4)
        processes.kill("rollout_server-node-a")

    async def _summarize(self, processes: Supervisor, services: Services) -> dict[str, Any]:
        self.stored = [trajectory async for trajectory in trajectories(services)]
        return await Run._summarize(self, processes, services)


def make_run(folder: Path, *, kills: bool, timeout_seconds: float) -> KillingRun:
    """Two nodes sample, one trains; two held-out tasks."""
    make_quickstart(folder)
    lines = (folder / "tasks.jsonl").read_text().splitlines()
    (folder / "heldout.jsonl").write_text("\n".join(lines[:2]) + "\n")
    text = CONFIG.replace("{folder}", str(folder))
    (folder / "run.toml").write_text(text)
    config = LauncherConfig(**tomllib.loads(text)["launcher"])
    ports = free_ports(config)
    layout = Layout(
        folder=folder / "run",
        run_id=config.name,
        config_file=folder / "run.toml",
        ports=ports,
        redis_url=f"redis://127.0.0.1:{ports['redis']}",
    )
    layout.folder.mkdir()
    redis = redis_server.server_plan(config, layout.folder, ports["redis"])
    evaluation = EvaluationConfig(
        every_steps=2,
        tasks=str(folder / "heldout.jsonl"),
        samples=2,
        metric="score",
        stop_patience=2,
        timeout_seconds=timeout_seconds,
    )
    plans = {"redis": redis, **plan(config, layout, evaluation)}
    return KillingRun(config, layout, plans, NotingView(), evaluation=evaluation, kills=kills)


def versions_of(trajectory: trajectory_pb2.Trajectory) -> set[int]:
    """Versions that sampled it."""
    spans = [span for turn in trajectory.turns for span in turn.tokens.spans]
    return {s.weight_version for s in spans if s.origin == tokens_pb2.ORIGIN_POLICY}


def check(run: KillingRun, summary: dict[str, Any], *, hangs: bool) -> None:
    """What must hold, with and without a kill."""
    text = (run.layout.folder / "evaluation.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert isinstance(run.view, NotingView)
    notes = run.view.notes
    before, best, *_, after = lines
    assert (before["label"], after["label"]) == ("before", "after")
    assert [line["is_best"] for line in lines] == [True, True] + [False] * (len(lines) - 2)
    assert (best["mean"], best["num_rollouts"]) == (1.0, 4)

    # Rollouts of an evaluation have one version, others of the same time do not (control).
    heldout = [t for t in run.stored if t.purpose == tokens_pb2.PURPOSE_EVAL]
    training = [t for t in run.stored if t.purpose == tokens_pb2.PURPOSE_TRAIN]
    assert all(len(versions_of(trajectory)) <= 1 for trajectory in heldout)
    assert any(len(versions_of(trajectory)) > 1 for trajectory in training)

    # Training went on beside evaluations, and one that hung was given up and taken back.
    stuck = lines[2]
    assert (stuck["mean"] is None) == hangs
    if hangs:
        assert "timeout_seconds" in stuck["abandoned"]
    shown = {text.partition(":")[0]: step for step, text in notes if text.startswith("step ")}
    assert shown[f"step {best['step']}"] > best["step"] + 1
    assert shown[f"step {stuck['step']}"] > stuck["step"] + 1
    running = trajectory_pb2.ROLLOUT_STATE_RUNNING
    assert not [t.rollout_id for t in heldout if t.state == running]

    # Two evaluations without a better mean end it; the last step is evaluated too.
    assert summary["stopped_early"].startswith("score is not better than the 1")
    assert 0 < summary["optimizer_steps"] < STEPS
    assert after["step"] == summary["optimizer_steps"]

    # Retention has deleted the step's own folder.
    folder = run.layout.folder / "checkpoints"
    kept = json.loads((folder / "best" / "best.json").read_text())
    assert (kept["step"], kept["value"]) == (best["step"], 1.0)
    assert not (folder / f"step_{best['step']:09d}").exists()
    assert read_parameters(folder / "best")
    assert (run.layout.folder / "reward_curve.png").is_file()
