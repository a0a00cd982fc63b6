"""Which process is started from which tree, one change after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from tests.suites.mixed.source_tree import SourceTree

UPGRADE_ORDER = (
    "trajectory_manager",
    "weights",
    "scheduler",
    "ranker",
    "scoring",
    "rollout_gateway",
    "rollout_server-node-a",
    "rollout_server-node-b",
    "node_agent-node-a",
    "node_agent-node-b",
    "trainer",
    "dataloader",
    "agent_runner",
)
"""Every process of the run but Redis; those that others call come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One process is stopped, and started from a tree; all others go on."""

    phase: str
    """For people: what it is a part of."""
    process: str
    """Name of its plan."""
    tree: SourceTree
    """Where it comes from afterwards."""

    def __str__(self) -> str:
        return f"{self.process} from {self.tree.name} ({self.phase})"


def changes(
    processes: Sequence[str], old: SourceTree, new: SourceTree, seed: int
) -> Iterator[Change]:
    """All changes of a run that begins and ends with every process from `new`.

    Each process alone from `old` and back; then all to `old` in an order drawn with `seed`; then
    all to `new`, in the order given.
    """
    for process in processes:
        for tree in (old, new):
            yield Change(phase="one at a time", process=process, tree=tree)
    for process in Random(seed).sample(processes, len(processes)):
        yield Change(phase="rolling downgrade", process=process, tree=old)
    for process in processes:
        yield Change(phase="rolling upgrade", process=process, tree=new)
