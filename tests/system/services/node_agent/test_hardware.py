"""The hardware of a node by the names of its GPUs, and what the scheduler makes of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler.policy.placement import train_priority
from services.node_agent.cli import hardware
from services.node_agent.config import NodeAgentConfig


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs 0 and 1 are of one kind, 2 of another, 3 of an unknown one, as nvidia-smi says."""
    kinds = ["NVIDIA H100 80GB HBM3, 81559"] * 2 + ["NVIDIA L40S, 46068", "Abacus 9, 100"]
    for index, kind in enumerate(kinds):
        (tmp_path / str(index)).write_text(kind + "\n")
    program = tmp_path / "nvidia-smi"
    asked = '$(echo "$@" | sed "s/.*--id=//" | tr , " ")'
    program.write_text(f'#!/bin/sh\ncd {tmp_path}\nfor id in {asked}; do cat "$id"; done\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def node(gpus: tuple[int, ...], **settings: float) -> NodeAgentConfig:
    """A node with these GPUs."""
    given = {"node_id": "n", "run_id": "r", "capability_tags": ("rollout",), **settings}
    return NodeAgentConfig(**given, rollout_server="a:1", gpus=gpus)


@pytest.mark.usefixtures("machine")
async def test_nodes_of_other_gpus_have_other_priorities() -> None:
    """Without a setting: the one with more FLOP/s for its bandwidth, the L40S, trains first."""
    two, one = await hardware(node((0, 1))), await hardware(node((2,)))
    assert (two.flops, two.memory_bytes_per_second) == (2 * 989e12, 2 * 3.35e12)
    assert two.device_bytes == 2 * 81559 * 2**20
    priorities = [train_priority(each.memory_bytes_per_second, each.flops) for each in (two, one)]
    assert 0 < priorities[0] < priorities[1]


@pytest.mark.usefixtures("machine")
async def test_what_is_configured_is_stronger() -> None:
    """And a GPU that is not known leaves the rest unknown."""
    found = await hardware(node((0,), flops=1e15))
    assert (found.flops, found.memory_bytes_per_second) == (1e15, 3.35e12)
    unknown = await hardware(node((0, 3)))
    assert (unknown.flops, unknown.device_bytes) == (0.0, (81559 + 100) * 2**20)


async def test_without_gpus_or_nvidia_smi_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine without GPUs."""
    monkeypatch.setenv("PATH", "")
    for gpus in ((), (0,)):
        assert (await hardware(node(gpus))).flops == 0.0
