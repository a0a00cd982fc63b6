"""How often each mechanism acted in a run, for its summary: a configured one may have no occasion.

From three records: the scheduler's audit log, the lines of the steps, and the counters of the
processes, which a process that is started again begins anew.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb

from services.launcher.layout import LOOPBACK

COUNTERS = {
    "samples_scored": "seamflow_scoring_samples_total",
    "long_turns_kept_apart": "seamflow_rollout_gateway_long_turns_total",
    "weight_bytes_relayed": "seamflow_rollout_server_weight_relayed_bytes_total",
}
"""Counters of the processes by their name in the summary."""
_PORTS = ".ports.json"
_SECONDS = 2.0


def ports_file(logs: Path, process: str) -> Path:
    """Where a process of the run says at which ports it listens."""
    return logs / f"{process}{_PORTS}"


@dataclass(slots=True)
class NodeMoves:
    """What the scheduler's audit log says of a run's nodes, over all its lives.

    An assignment counts once the node reported itself active in it; the return of a lent node, once
    it has taken up a later assignment.
    """

    num_lent: int = 0
    """Nodes that can train and were lent to rollout."""
    num_returned: int = 0
    """Of those, nodes that were returned."""
    switches: Counter[str] = field(default_factory=Counter)
    """Assignments taken up, by tag."""
    num_tails: int = 0
    """Computed numbers of rollouts that remain when a gang begins (R_t)."""
    num_resizes: int = 0
    """Changes of the number of nodes that a gang trains on."""
    sequence: int = 0
    """Of the newest event."""
    _lent: set[str] = field(default_factory=set)
    _epochs: dict[str, int] = field(default_factory=dict)

    def add(self, event: scheduler_pb.AllocationEvent) -> None:
        """Count an event; they come in their order."""
        self.sequence = event.sequence
        self.num_tails += event.kind == "tail"
        self.num_resizes += event.kind == "resized"
        node = event.node
        if not event.HasField("node") or node.reported_epoch != node.assignment.epoch:
            return
        is_active = node.state == scheduler_pb.NODE_STATE_ACTIVE
        if is_active and self._epochs.get(node.node_id) != node.reported_epoch:
            self._epochs[node.node_id] = node.reported_epoch
            self.switches[node.assignment.tag] += 1
        if node.assignment.lent and is_active:
            self.num_lent += node.node_id not in self._lent
            self._lent.add(node.node_id)
        elif not node.assignment.lent and node.node_id in self._lent:
            self.num_returned += 1
            self._lent.discard(node.node_id)


def of_steps(steps: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Optimizer steps that began before their batch was whole, and tasks of a fused pipeline that
    filled idle times of the other model."""
    found = Counter[str]()
    for step in steps:
        begun_with = step.get("num_groups_at_start", step["num_groups"])
        found["steps_begun_early"] += begun_with < step["num_groups"]
        found["tasks_interleaved"] += int(step.get("tasks_interleaved", 0))
    return dict(found)


async def of_processes(logs: Path) -> dict[str, int]:
    """The sums of `COUNTERS` over the processes on this machine that still answer."""
    pages = await asyncio.to_thread(_all_metrics, logs)
    return {name: round(_total(pages, metric)) for name, metric in COUNTERS.items()}


def _all_metrics(logs: Path) -> list[str]:
    files = list(logs.glob(f"*{_PORTS}"))
    with ThreadPoolExecutor(max(len(files), 1)) as threads:
        return list(threads.map(_metrics, files))


def _metrics(file: Path) -> str:
    with suppress(OSError, ValueError, URLError):
        port = json.loads(file.read_text())["admin_port"]
        with urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=_SECONDS) as page:
            return str(page.read().decode())
    return ""


def _total(pages: Sequence[str], metric: str) -> float:
    return sum(
        sample.value
        for page in pages
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == metric
    )
