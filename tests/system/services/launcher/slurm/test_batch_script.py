"""The batch script, run by bash with an srun and a scontrol that write down what they get."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from services.chassis.config.load import load
from services.launcher.config import LauncherConfig
from services.launcher.layout import places
from services.launcher.process_plan import plan
from tests.lib.end_to_end.support import ROOT, child_environment
from tests.lib.launcher.support import make_layout
from tests.lib.redis_server import free_port
from tests.lib.trainer.support import make_model

CONFIG = """
[launcher]
name = "big"
runs_folder = "{folder}/runs"
model = "m"
tasks = "t.jsonl"
agent = "a:B"
nodes = [
    "a: rollout; gpus 0-3; servers 4",
    "b: train; gpus 4-7",
    "c: rollout; gpus 0-7; servers 8; host 1",
]
"""
SRUN = """#!/bin/bash
LINE=$(printf '%s\\t' "$@")
echo "$LINE" >>"$RECORD"  # in one piece
case "$*" in *" train "*) while [ ! -e "$RECORD.end" ]; do sleep 0.05; done; exit 3 ;; esac
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; echo 10.0.0.2; else echo "scontrol $*" >>"$RECORD"; fi
"""


def made(folder: Path) -> Path:
    """The script by the command, and the programs that it calls."""
    (folder / "run.toml").write_text(CONFIG.format(folder=folder))
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    command = [sys.executable, "-m", "seamflow.cli.main", "slurm", "--out", str(folder / "job.sh")]
    subprocess.run(
        [*command, "--config", str(folder / "run.toml"), "--gpus-per-node", "8"],
        cwd=ROOT,
        env=child_environment({}),
        check=True,
    )
    return folder / "job.sh"


def recorded(folder: Path) -> list[list[str]]:
    """The arguments of each call so far."""
    file = folder / "record"
    return [line.split("\t")[:-1] or [line] for line in file.read_text().splitlines()]


@functools.cache
def job_id() -> str:
    """Of a job whose port, 20000 and this number, no other process here has."""
    ports = (free_port() for _ in itertools.count())
    return str(next(port for port in ports if 20_000 <= port < 30_000) - 20_000)


def variables(folder: Path) -> Mapping[str, str]:
    """Of a job."""
    job = {
        "SLURM_JOB_ID": job_id(),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "RECORD": str(folder / "record"),
    }
    return {**os.environ, **job, "PATH": f"{folder}:{os.environ['PATH']}"}


def wait_for(folder: Path, text: str, times: int = 1) -> None:
    """Until a call with this argument has been written down so often."""
    while sum(text in call for call in recorded(folder)) < times:
        time.sleep(0.05)


def test_what_would_end_the_job_is_told(tmp_path: Path) -> None:
    """As the dry run tells it, and a folder without seamflow; without them nothing is told."""
    model, tasks = make_model(tmp_path / "model"), tmp_path / "tasks.jsonl"
    weights, venv = model / "model.safetensors", tmp_path / "venv" / "bin"
    (tmp_path / "run.toml").write_text(
        f'[launcher]\nname = "r"\nruns_folder = "{tmp_path}/runs"\nmodel = "{model}"\n'
        f'tasks = "{tasks}"\nraw_tokens = true\nagent = "examples.quickstart.agent:ElevatorAgent"\n'
        'nodes = ["a: rollout train", "b: rollout; host 1"]\n'
    )

    def said() -> str:
        command = [sys.executable, "-m", "seamflow.cli.main", "slurm"]
        done = subprocess.run(
            [*command, "--config", str(tmp_path / "run.toml"), "--venv", str(venv.parent)],
            cwd=ROOT,
            env=child_environment({}),
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stderr

    assert f"slurm: warning: tasks: '{tasks.name}' does not exist in {tasks.parent}" in (
        first := said()
    )
    assert "which has no bin/seamflow" in first
    weights.rename(weights.with_suffix(".kept"))
    assert "has no weights" in said()
    weights.with_suffix(".kept").rename(weights)
    tasks.write_text('{"task_id": "a", "payload": {}}\n')
    venv.mkdir(parents=True)
    (venv / "seamflow").touch()
    assert "warning" not in said()


@pytest.mark.timeout(60)
def test_the_script_starts_each_host_once_and_requeues_the_job(tmp_path: Path) -> None:
    """USR1 makes a checkpoint first; the job's code is that of the training."""
    script = made(tmp_path)
    assert subprocess.run(["bash", "-n", str(script)], check=True).returncode == 0
    (tmp_path / "record").touch()
    with subprocess.Popen(["bash", str(script)], env=variables(tmp_path), cwd=tmp_path) as job:
        wait_for(tmp_path, "train")
        wait_for(tmp_path, "join")
        job.send_signal(signal.SIGUSR1)
        wait_for(tmp_path, f"scontrol requeue {job_id()}")
        (tmp_path / "record.end").touch()
        assert job.wait() == 3
    calls = recorded(tmp_path)
    train = next(call for call in calls if "train" in call)
    join = next(call for call in calls if "join" in call)
    assert ("--nodelist=127.0.0.1" in train, "--nodelist=10.0.0.2" in join) == (True, True)
    address, port = join[join.index("join") + 1].split(":")
    assert (address, port) == ("127.0.0.1", train[train.index("--join-port") + 1])
    assert "--resume" not in train
    saved = next(call for call in calls if "save-checkpoint" in call)
    assert calls.index(saved) < calls.index([f"scontrol requeue {job_id()}"])


@pytest.mark.timeout(60)
def test_a_requeued_job_resumes_and_its_gpus_have_one_owner_each(tmp_path: Path) -> None:
    """The script's own command, planned: on each of its machines processes have disjoint GPUs."""
    script = made(tmp_path)
    (tmp_path / "runs/big").mkdir(parents=True)
    for name in ("runs/big/began_with.json", "record", "record.end"):
        (tmp_path / name).touch()
    done = subprocess.run(["bash", str(script)], env=variables(tmp_path), cwd=tmp_path, check=False)
    assert done.returncode == 3
    train = next(call for call in recorded(tmp_path) if "train" in call)
    flags = train[train.index("train") + 1 :]
    assert flags.pop() == "--resume"
    config = load(LauncherConfig, "launcher", flags)
    layout = make_layout(config, tmp_path)
    planned = plan(config, replace(layout, hosts=config.hosts, places=places(config)))
    for host in (0, 1):
        seen = [
            set(each.environment["CUDA_VISIBLE_DEVICES"].split(","))
            for each in planned.values()
            if each.host == host and "CUDA_VISIBLE_DEVICES" in each.environment
        ]
        assert all(not one & other for one, other in itertools.combinations(seen, 2))
        assert set().union(*seen) == set("01234567")
