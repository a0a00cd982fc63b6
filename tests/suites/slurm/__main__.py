"""`make test-slurm`: a run as a job of a real Slurm, a node drained, the job requeued and resumed.

Three nodes in network namespaces of this machine. The script is that of `seamflow slurm`. A node of
the job is drained in the middle, and the job gets its signal: it writes a checkpoint, is requeued,
and continues with the next step on the nodes that are left. Control: a script that does not resume.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.report import RESULTS, Report
from tests.chaos.suite import broken_limits, exit_if_broken
from tests.lib.end_to_end.quickstart_files import make_quickstart
from tests.suites.slurm.cluster import (
    PACKAGES,
    cluster,
    missing_programs,
    own_network,
    slurm,
    wait_for,
)

BENCH = "test-slurm"
_ROOT = Path(__file__).parents[3]
_STEPS = 10
_STEPS_BEFORE = 3
_ZERO = ("steps_lost", "steps_twice", "jobs_on_drained_nodes")
_RESUMES = "then RESUME=(--resume); fi"
_CONFIG = """
[launcher]
name = "{name}"
runs_folder = "{folder}/runs"
model = "{folder}/model"
tasks = "{folder}/tasks.jsonl"
agent = "examples.quickstart.agent:ElevatorAgent"
nodes = ["node-a: train", "node-b: rollout; host 1"]
group_size = 2
groups_per_step = 2
concurrency = 4
lease_seconds = 5

[trainer]
num_steps = {steps}

[rollout_server]
engine = "fake"
fake_vocab_size = 46
fake_mean_tokens = 8
fake_step_seconds = 0.1
max_context = 256

[dataloader]
epochs = 0
"""


class Job:
    """A run of this name, submitted."""

    def __init__(self, folder: Path, name: str, *, resumes: bool = True) -> None:
        self.run = folder / "runs" / name
        self.log = folder / f"{name}.log"
        file, script = folder / f"{name}.toml", folder / f"{name}.sh"
        file.write_text(_CONFIG.format(name=name, folder=folder, steps=_STEPS))
        command = (sys.executable, "-m", "seamflow.cli.main", "slurm", "--config", str(file))
        venv = ("--venv", sys.prefix)
        text = subprocess.run([*command, *venv], check=True, capture_output=True, text=True).stdout
        assert _RESUMES in text
        script.write_text(text if resumes else text.replace(_RESUMES, "then :; fi"))
        self.number = slurm("sbatch", "--parsable", f"--output={self.log}", str(script))
        assert self.number, "the job was not taken"

    def steps(self) -> list[int]:
        """Optimizer steps so far."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def shown(self, field: str) -> str:
        """A field of `scontrol show job`."""
        found = re.search(rf"\b{field}=(\S+)", slurm("scontrol", "show", "job", self.number))
        return found[1] if found else ""

    def nodes(self) -> list[str]:
        """Where it runs, host 0 first."""
        return slurm("scontrol", "show", "hostnames", self.shown("NodeList")).split()

    def requeue(self) -> int:
        """Tell it that its time is over; the step of the checkpoint that it wrote."""
        slurm("scancel", "--batch", "--signal=USR1", self.number)
        self.wait("PENDING")
        # Slurm holds a requeued job back for two minutes.
        wait_for("an early start", lambda: self._starts_now())
        saved = re.findall(r"checkpoint of step (\d+) is durable", self.log.read_text())
        return int(saved[-1]) if saved else 0

    def wait(self, *states: str) -> str:
        """Until it is in one of the states; which."""
        wait_for(f"job {self.number} {states}", lambda: self.shown("JobState") in states)
        return self.shown("JobState")

    def _starts_now(self) -> bool:
        slurm("scontrol", "update", f"jobid={self.number}", "StartTime=now")
        return self.shown("JobState") != "PENDING"


def resumed_run(folder: Path) -> dict[str, float]:
    """A run whose job loses a node and is requeued."""
    job = Job(folder, "resumed")
    wait_for("steps", lambda: len(job.steps()) >= _STEPS_BEFORE)
    drained = job.nodes()[-1]
    slurm("scontrol", "update", f"nodename={drained}", "state=drain", "reason=test")
    saved = job.requeue()
    job.wait("RUNNING")
    nodes = job.nodes()
    state = job.wait("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    slurm("scontrol", "update", f"nodename={drained}", "state=resume")
    steps = job.steps()
    print(job.log.read_text(errors="replace"), file=sys.stderr)
    return {
        "jobs_completed": int(state == "COMPLETED"),
        "requeues": int(job.shown("Restarts") or 0),
        "checkpoint_step": saved,
        "steps_trained": len(set(steps)),
        "steps_lost": len({*range(1, _STEPS + 1)} - {*steps}),
        "steps_twice": len(steps) - len(set(steps)),
        "jobs_on_drained_nodes": int(drained in nodes),
    }


def control(folder: Path) -> dict[str, float]:
    """A script that does not resume is refused: the run exists."""
    job = Job(folder, "control", resumes=False)
    wait_for("a step", lambda: len(job.steps()) >= 1)
    job.requeue()
    state = job.wait("COMPLETED", "FAILED")
    failed = state == "FAILED" and "--resume it" in job.log.read_text()
    return {"negative_controls": 1, "negative_controls_failed": int(failed)}


def main() -> None:
    """Run both, print and write the figures; exit 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-control", action="store_true", help="the first part, no result")
    given = parser.parse_args()
    if missing := missing_programs():
        sys.exit(f"missing {', '.join(missing)}: apt-get install {PACKAGES}")
    if os.geteuid() != 0:
        sys.exit("network namespaces and munge need root")
    own_network()
    with tempfile.TemporaryDirectory(prefix="seamflow-slurm-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # munge refuses others
        make_quickstart(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join((str(_ROOT / "sdk"), str(_ROOT)))
        (folder / "cluster").mkdir()
        with cluster(folder / "cluster"):
            figures: dict[str, Any] = resumed_run(folder)
            figures |= {} if given.no_control else control(folder)
    report = Report(bench=BENCH, figures=figures)
    report.show() if given.no_control else report.publish(RESULTS)
    figures["steps_lost"] += figures["jobs_completed"] != 1 or not figures["checkpoint_step"]
    exit_if_broken(broken_limits(figures, {}, _ZERO))


if __name__ == "__main__":
    main()
