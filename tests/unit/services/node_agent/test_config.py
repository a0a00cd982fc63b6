"""Settings of the node agent, and their validation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler.policy.placement import train_priority
from services.chassis.config.load import load
from services.node_agent.cli import hardware
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
        ({"workers": (WorkerConfig(tag="rollout", address="localhost:1"),)}, "given twice"),
        (
            {
                "capability_tags": ("rollout", "critic"),
                "workers": tuple(WorkerConfig(tag="critic", address=f"x:{n}") for n in (1, 2)),
            },
            "give one",
        ),
        ({"flops": -1.0}, "flops"),
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


def test_processes_see_the_gpus_of_their_node() -> None:
    """Or those of them that they are given; others are refused."""
    from services.node_agent.config import ProcessConfig

    def config(environment: dict[str, str], gpus: tuple[int, ...] = (4, 5)) -> dict[str, str]:
        process = ProcessConfig(command=("a",), address="localhost:1", environment=environment)
        given = {**GOOD, "processes": {"server": process}, "state_folder": Path(), "gpus": gpus}
        return dict(NodeAgentConfig(**given).environment_of(process))

    assert config({"A": "1"}) == {
        "A": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "4,5",
    }
    assert config({"CUDA_VISIBLE_DEVICES": "5"})["CUDA_VISIBLE_DEVICES"] == "5"
    assert config({"A": "1"}, gpus=()) == {"A": "1"}
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES with 3, .* gpus \[4, 5\]"):
        config({"CUDA_VISIBLE_DEVICES": "3,4"})


async def test_a_kind_of_devices_tells_the_scheduler_what_the_node_has() -> None:
    """For each of its GPUs; single figures that are set are stronger."""
    config = NodeAgentConfig(**GOOD, kind="h20-96", gpus=(0, 1), device_bytes=7)
    found = await hardware(config)
    assert (found.flops, found.memory_bytes_per_second) == (2 * 148e12, 2 * 4.0e12)
    assert found.device_bytes == 7
    assert train_priority(found.memory_bytes_per_second, found.flops) == pytest.approx(4.6, abs=0.1)
    assert (await hardware(NodeAgentConfig(**GOOD))).flops == 0


def test_an_unknown_kind_is_refused_with_those_that_are_known() -> None:
    """A name that is nearly right is suggested."""
    with pytest.raises(ValueError, match=r"kind is 'h20-69': give one of .*h20-96"):
        NodeAgentConfig(**GOOD, kind="h20-69")
