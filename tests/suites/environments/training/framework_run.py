"""A training run on one framework: the launcher, with an environment in place of an agent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lib.end_to_end.support import ROOT, child_environment
from tests.suites.environments.training.frameworks import Framework
from tests.suites.environments.training.tiny_start import make_model, make_tasks

STEPS = 3
_NUM_TASKS = 64
_CONFIG = """
[launcher]
{launcher}
nodes = ["node-a: rollout", "node-b: rollout train"]
group_size = 4
groups_per_step = 4
lease_seconds = 60

[trainer]
num_steps = {steps}

[trainer.optimizer]
learning_rate = 1e-3

[rollout_server]
max_running = 16
max_context = 1024

[environments]
max_turns = 8
max_new_tokens = 1
max_episodes = 16

[dataloader]
epochs = 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What a run has come to."""

    figures: Mapping[str, float]
    """Counts, by name."""
    rewards: list[float]
    """Mean reward of each step."""


def train(framework: Framework, folder: Path, seed: int) -> RunFigures:
    """Train the embedded model for three optimizer steps.

    Raises:
        RuntimeError: the run fails; the message has the end of its output.
    """
    make_model(folder / "model", framework.words, seed)
    make_tasks(folder / "tasks.jsonl", _NUM_TASKS)
    config, run = folder / "run.toml", folder / "runs" / "run"
    with framework.backend() as extra:
        config.write_text(_text(framework, folder, seed, extra), encoding="utf-8")
        command = [sys.executable, "-m", "services.launcher", "--config", str(config)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=child_environment({}),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{framework.case.name}: {(done.stdout + done.stderr)[-4000:]}")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    names = ("optimizer_steps", "weight_updates", "rollouts", "turns")
    figures = {name: float(summary[name]) for name in names}
    figures["failures"] = _num_failures(run / "logs")
    return RunFigures(figures=figures, rewards=[json.loads(line)["reward_mean"] for line in lines])


def _num_failures(logs: Path) -> int:
    """Episodes that failed, by the logs of the processes that ran them."""
    texts = [file.read_text(encoding="utf-8") for file in logs.glob("environments-*.log")]
    assert texts, f"no log of an environments process in {logs}"
    return sum(text.count("episode failed") for text in texts)


def _text(framework: Framework, folder: Path, seed: int, extra: Mapping[str, Any]) -> str:
    case = framework.case
    settings: dict[str, Any] = {
        "name": "run",
        "runs_folder": str(folder / "runs"),
        "model": str(folder / "model"),
        "seed": seed,
    }
    if not framework.has_tasks:
        settings["tasks"] = str(folder / "tasks.jsonl")
    if case.command:
        settings |= extra
    else:
        settings |= {
            "environment": case.environment,
            "environment_arguments": {**case.arguments, **framework.arguments, **extra},
            "environment_python": str(case.python),
        }
    lines = [f"{name} = {_toml(value)}" for name, value in settings.items()]
    return _CONFIG.format(launcher="\n".join(lines), steps=STEPS)


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    return json.dumps(value)
