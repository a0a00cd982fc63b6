"""A run of one model folder by the launcher: two optimizer steps, or a refusal."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lib.end_to_end.support import ROOT, child_environment

STEPS = 2
_SECONDS = 180.0
CONFIG_EXIT = 78
_CONFIG = """
[launcher]
name = "run"
runs_folder = "{folder}/runs"
model = "{model}"
environment = "tests.suites.models.letter_share:LetterShare"
nodes = ["node-a: rollout train"]
group_size = 4
groups_per_step = 2
max_staleness = 0
seed = {seed}

[trainer]
num_steps = {steps}

[trainer.optimizer]
learning_rate = 1e-3

[environments]
max_new_tokens = 16

[rollout_server]
max_running = 8
max_context = 384

[dataloader]
epochs = 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the launcher made of a model folder."""

    exit_code: int
    """Of the launcher; -1: it did not end in time and was ended."""
    output: str
    """Its standard output and error."""
    steps: list[dict[str, Any]]
    """The trainer's figures of each optimizer step."""
    processes: list[str]
    """Logs of the processes that were started."""

    @property
    def logprob_diff(self) -> float:
        """Mean difference of a token's log-prob in engine and trainer; of the worst step."""
        return _worst([step["train_rollout_logprob_abs_diff"] for step in self.steps])

    @property
    def logprob_diff_bound(self) -> float:
        """No token of any step differs by more: the root of the sum of all squares."""
        squares = [step["log_ratio_squared_mean"] * step["num_tokens"] for step in self.steps]
        return math.sqrt(_worst(squares))


def _worst(values: Sequence[float]) -> float:
    """The largest, or NaN if one of them is."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def launch(model: Path, folder: Path, seed: int) -> Outcome:
    """Start the launcher on a model folder, and wait for its end."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "run.toml"
    text = _CONFIG.format(folder=folder, model=model, seed=seed, steps=STEPS)
    config.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "services.launcher", "--config", str(config)]
    with (folder / "output.txt").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=child_environment({}), stdout=output, stderr=output
        )
        code = _wait(process)
        output.seek(0)
        text = output.read()
    run = folder / "runs" / "run"
    return Outcome(
        exit_code=code,
        output=text,
        steps=_steps(run / "metrics.jsonl"),
        processes=sorted(file.name for file in (run / "logs").glob("*.log")),
    )


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return -1


def _steps(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
