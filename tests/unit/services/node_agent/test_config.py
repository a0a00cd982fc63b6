"""Settings of the node agent, and their validation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.chassis.config.load import load
from services.node_agent.config import NodeAgentConfig, WorkerConfig
from tests.lib.scheduler.support import RUN

DOCUMENT = """
[node_agent]
node_id = "a"
run_id = "main"
capability_tags = ["rollout", "critic"]
rollout_server = "127.0.0.1:1"
state_folder = "/tmp/state"
workers = [
    {tag = "critic", address = "127.0.0.1:2"},
    {tag = "critic", address = "127.0.0.1:3", run_id = "other"},
]

[node_agent.processes.critic]
command = ["python", "-m", "critic"]
address = "127.0.0.1:2"
environment = {CUDA_VISIBLE_DEVICES = "0"}
deactivate_seconds = 60
"""
GOOD = {
    "node_id": "a",
    "run_id": RUN,
    "capability_tags": ("rollout",),
    "rollout_server": "localhost:1",
}


def test_workers_and_processes_are_read_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields and entries define the workers; each process has a separate table."""
    for name in list(os.environ):
        if name.startswith("SEAMFLOW_"):
            monkeypatch.delenv(name)
    (tmp_path / "node.toml").write_text(DOCUMENT)
    config = load(NodeAgentConfig, "node_agent", ["--config", str(tmp_path / "node.toml")])
    assert config.all_workers == (
        WorkerConfig(tag="rollout", address="127.0.0.1:1", run_id="main"),
        WorkerConfig(tag="critic", address="127.0.0.1:2", run_id="main"),
        WorkerConfig(tag="critic", address="127.0.0.1:3", run_id="other"),
    )
    critic = config.processes["critic"]
    assert critic.command == ("python", "-m", "critic")
    assert critic.environment == {"CUDA_VISIBLE_DEVICES": "0"}
    assert (critic.deactivate_seconds, critic.end_seconds) == (60.0, 20.0)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"capability_tags": ()}, "capability_tags"),
        ({"capability_tags": ("rollout", "training")}, "training"),
        ({"capability_tags": ("rollout", "train")}, "trainer"),
        ({"trainer": "localhost:1"}, "trainer"),
        ({"workers": (WorkerConfig(tag="critic", address="x:1"),)}, "critic"),
        ({"workers": (WorkerConfig(tag="rollout", address="x:1"),)}, "give one"),
        ({"flops": -1.0}, "flops"),
        ({"recheck_seconds": 0.0}, "recheck_seconds"),
    ],
)
def test_wrong_configuration_is_rejected(wrong: dict[str, object], expected: str) -> None:
    """The message names the field."""
    NodeAgentConfig(**GOOD)
    with pytest.raises(ValueError, match=expected):
        NodeAgentConfig(**{**GOOD, **wrong})


@pytest.mark.parametrize(
    ("process", "folder", "expected"),
    [
        ({"command": ("a",), "address": "localhost:1"}, None, "state_folder"),
        ({"command": ("a",), "address": "localhost:2"}, Path(), "use one of localhost:1"),
    ],
)
def test_a_process_needs_a_worker_and_a_folder(
    process: dict[str, object], folder: Path | None, expected: str
) -> None:
    """The message names the field and the cure."""
    from services.node_agent.config import ProcessConfig

    processes = {"server": ProcessConfig(**process)}
    with pytest.raises(ValueError, match=expected):
        NodeAgentConfig(**GOOD, processes=processes, state_folder=folder)
