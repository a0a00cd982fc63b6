"""Real runs whose agents are programs that the launcher does not start."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from tests.lib.end_to_end.quickstart_files import make_quickstart
from tests.lib.end_to_end.support import ROOT, child_environment

AGENT = "examples.quickstart.http_agent"
CONFIG = """
[launcher]
name = "outside"
runs_folder = "{folder}/runs"
model = "{folder}/model"
tasks = "{folder}/tasks.jsonl"
heldout_tasks = "{folder}/heldout.jsonl"
{agent}
nodes = ["node-a: rollout", "node-b: train"]
group_size = 2
groups_per_step = 2

[trainer]
num_steps = 2

[rollout_server]
max_running = 8
max_context = 256

[dataloader]
epochs = 0
"""
OTHERS = {
    "SEAMFLOW_RUN": "somebody",
    "SEAMFLOW_RUN_ID": "somebody",
    "SEAMFLOW_GATEWAY": "127.0.0.1:1",
    "SEAMFLOW_HTTP_GATEWAY": "http://127.0.0.1:1",
    "SEAMFLOW_AGENT_TOKEN": "somebody's",
    "SEAMFLOW_TRAINER": "127.0.0.1:1",
}
"""What a user's shell may still have of another run: none is a setting of a process."""
TABLES = (
    "launcher",
    "trajectory_manager",
    "rollout_gateway",
    "http_gateway",
    "rollout_server",
    "scheduler",
    "node_agent",
    "trainer",
    "weights",
    "dataloader",
    "evaluator",
)
GATEWAY = "ROLLOUT_GATEWAY"
ADDRESS = re.compile(r"SEAMFLOW_HTTP_GATEWAY=(http://\S+)")


def make_config(folder: Path, agent: str = "") -> Path:
    """A model without warm start, tasks, and the configuration file of the run."""
    make_quickstart(folder)
    tasks = (folder / "tasks.jsonl").read_text().splitlines()
    (folder / "heldout.jsonl").write_text("\n".join(tasks[:2]) + "\n")
    config = folder / "run.toml"
    config.write_text(CONFIG.format(folder=folder, agent=agent))
    return config


def identities(folder: Path) -> dict[str, str]:
    """Variables that give each process a token of its own, and make it ask callers for theirs."""
    tokens, digests = folder / "tokens", folder / "digests"
    tokens.mkdir()
    digests.mkdir()
    variables = {f"SEAMFLOW_{table}_AGENT_TOKEN": "of-agents" for table in ("LAUNCHER", GATEWAY)}
    for table in TABLES:
        name = table.replace("_", "-")
        (tokens / name).write_text(f"of-{name}")
        digest = hashlib.sha256(f"of-{name}".encode()).hexdigest()
        (digests / name).write_text(f"sha256:{digest}")
        variables[f"SEAMFLOW_{table}_TOKEN_FILE".upper()] = str(tokens / name)
        variables[f"SEAMFLOW_{table}_SERVICE_TOKENS_FOLDER".upper()] = str(digests)
    return variables


@contextmanager
def seamflow(
    command: str, config: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[str]]:
    """`seamflow <command>` with a file, killed at the end of the test."""
    started = subprocess.Popen(
        [sys.executable, "-m", "seamflow.cli.main", command, "--config", str(config)],
        cwd=ROOT,
        env=child_environment({**OTHERS, **variables}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with started as process:
        try:
            yield process
        finally:
            process.kill()


def printed_address(process: subprocess.Popen[str]) -> str:
    """The address of the HTTP gateway, once the launcher prints it."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if found := ADDRESS.search(line):
            return found[1]
    raise AssertionError(said)


def lease(address: str) -> dict[str, Any]:
    """One rollout, as soon as the gateway answers and has a task."""
    body = json.dumps({"wait_seconds": 5}).encode()
    request = Request(f"{address}/rollouts/lease", body, {"content-type": "application/json"})
    leased: list[dict[str, Any]] = []
    while not leased:
        try:
            with urlopen(request) as reply:
                leased = json.load(reply)["rollouts"]
        except HTTPError:
            raise
        except URLError:  # it is starting
            time.sleep(0.1)
    return leased[0]


def summary_of(folder: Path) -> dict[str, Any]:
    """What the run has reported."""
    summary: dict[str, Any] = json.loads((folder / "runs/outside/summary.json").read_text())
    return summary


@pytest.mark.long(short="tests/system/end_to_end/test_training_run.py")
@pytest.mark.timeout(300)
def test_train_without_an_agent_trains_on_agents_from_outside(tmp_path: Path) -> None:
    """It evaluates, trains and ends; the agent learns of the end and ends well too."""
    with seamflow("train", make_config(tmp_path)) as run:
        variables = {"SEAMFLOW_HTTP_GATEWAY": printed_address(run)}
        command = [sys.executable, "-m", AGENT]
        agent = subprocess.run(
            command,
            cwd=ROOT,
            env=child_environment(variables),
            capture_output=True,
            text=True,
            check=False,
        )
        out, _ = run.communicate()
    assert (run.returncode, agent.returncode) == (0, 0), out + agent.stdout + agent.stderr
    assert "the run has ended" in agent.stdout
    summary = summary_of(tmp_path)
    assert summary["optimizer_steps"] == 2
    assert summary["heldout_tasks"] == 2
    assert None not in (summary["heldout_before"], summary["heldout_after"])
    assert summary["tokens_lost"] is None
    assert summary["token_audit"].startswith("not audited")
    assert "Traceback" not in out


@pytest.mark.long(short="tests/system/end_to_end/test_training_run.py")
@pytest.mark.timeout(300)
def test_train_starts_the_agents_program(tmp_path: Path) -> None:
    """With the addresses and its token in its environment; it ends when the run has ended.

    Every process has a token of its own, and may call what it needs.
    """
    config = make_config(tmp_path, f'agent_command = "python -m {AGENT}"')
    with seamflow("train", config, identities(tmp_path)) as run:
        out, _ = run.communicate()
    assert run.returncode == 0, out
    logs = {file.name: file.read_text() for file in (tmp_path / "runs/outside/logs").iterdir()}
    refused = re.compile("PERMISSION_DENIED|UNAUTHENTICATED")
    assert [name for name, text in logs.items() if refused.search(text)] == []
    assert "of-trainer" not in "".join(logs.values())
    assert summary_of(tmp_path)["optimizer_steps"] == 2
    assert "the run has ended" in (tmp_path / "runs/outside/logs/agent.log").read_text()


@pytest.mark.long(short="tests/system/end_to_end/test_training_run.py")
@pytest.mark.timeout(300)
def test_serve_leases_tasks_until_ctrl_c(tmp_path: Path) -> None:
    """The agent of the file is not started; Ctrl-C ends every process, with exit code 0."""
    config = make_config(tmp_path, 'agent = "examples.quickstart.agent:ElevatorAgent"')
    with seamflow("serve", config) as run:
        rollout = lease(printed_address(run))
        assert rollout["task"]["payload"]["calls"]
        assert rollout["credential"]
        assert not (tmp_path / "runs/outside/logs/agent_runner.log").exists()
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate()
    assert run.returncode == 0, out
    assert "all processes have ended" in out
    assert "Traceback" not in out
