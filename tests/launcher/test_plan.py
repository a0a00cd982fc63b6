"""A mode is nothing but tags."""

from __future__ import annotations

from pathlib import Path

import pytest
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.run_rules import rules
from services.launcher.plan import plan
from tests.launcher.support import make_config, make_layout

MODES = {
    "colocated": ("node-a: rollout train",),
    "disaggregated": ("node-a: rollout", "node-b: train"),
    "multiplexed": ("node-a: rollout", "node-b: rollout train"),
}


@pytest.mark.parametrize("nodes", MODES.values(), ids=MODES)
def test_each_tag_has_its_process(nodes: tuple[str, ...], tmp_path: Path) -> None:
    """A rollout server for each node that can roll out, one trainer, an agent for each node."""
    config = make_config(nodes=nodes)
    names = list(plan(config, make_layout(config, tmp_path)))
    num_rollout = sum("rollout" in node for node in nodes)
    assert sum(name.startswith("rollout_server") for name in names) == num_rollout
    assert sum(name.startswith("node_agent") for name in names) == len(nodes)
    assert names.count("trainer") == 1


def test_several_ranks_are_started_by_torchrun(tmp_path: Path) -> None:
    """World size 2 is a flag of torchrun, not another trainer."""
    config = make_config(trainer_ranks=2)
    command = plan(config, make_layout(config, tmp_path))["trainer"].command
    assert "torch.distributed.run" in command
    assert "--nproc-per-node=2" in command


def test_replicated_needs_a_redis_with_a_replica() -> None:
    """The private one has none; what the launcher is told to use may have."""
    with pytest.raises(ValueError, match="give redis_url"):
        make_config(durability="replicated")
    config = make_config(durability="replicated", redis_url="redis://127.0.0.1:1")
    assert rules(config).durability == trajectory_pb2.DURABILITY_REPLICATED


def test_ports_differ(tmp_path: Path) -> None:
    """No two processes share an address."""
    ports = make_layout(make_config(), tmp_path).ports
    assert len(set(ports.values())) == len(ports)


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"nodes": ("node-a rollout",)}, "write 'name: tags'"),
        ({"nodes": ("node-a: rolout",)}, "write 'name: tags'"),
        ({"nodes": ("node-a: rollout",)}, "exactly one node"),
        ({"group_size": 0}, "at least 1"),
        ({"name": "a/b"}, "use letters"),
    ],
)
def test_mistakes_name_the_cure(changes: dict[str, object], cure: str) -> None:
    """Each message says what would be right."""
    with pytest.raises(ValueError, match=cure):
        make_config(**changes)
