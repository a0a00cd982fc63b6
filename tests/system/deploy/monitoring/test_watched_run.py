"""A run of real processes, watched: its traces, and the metrics that dashboards and alerts name."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from seamflow import trace_context

from tests.lib.monitoring.monitoring_files import dashboards, metrics_in, rules
from tests.system.deploy.monitoring.collector import Collector, SpanRecord, reached
from tests.system.deploy.monitoring.run_rig import RUN_ID, RunRig, run_rig

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.long(short="tests/integration/services/chassis/rpc/test_interceptors.py"),
]
_WAIT_SECONDS = 30.0
_SUFFIXES = ("_bucket", "_sum", "_count", "_created")
_OF_PROMETHEUS = {"up"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What two steps of the run left."""

    collector: Collector
    """Spans: of group "whole" and step 1; of group "broken" and step 2, whose samples carried no
    trace."""
    scrapes: Mapping[str, str]
    """By table, the answer of /metrics after step 1."""

    def turn_and_swap(self, group: str, version: int) -> tuple[SpanRecord, SpanRecord]:
        """A turn of the group, and the swap to the version."""
        turn = self.collector.named("turn", rollout_id=f"{group}/0/1")[0]
        return turn, self.collector.named("swap", weight_version=version)[0]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """The run, played once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        return asyncio.run(_played(tmp_path_factory.mktemp("watched")))


async def _played(folder: Path) -> Watched:
    with Collector() as collector:
        async with run_rig(folder, {"otlp_endpoint": collector.endpoint}) as rig:
            await rig.play_group("whole")
            await rig.until_version(1)
            scrapes = {table: _scrape(port) for table, port in rig.admin_ports.items()}
            await _restart_untraced(rig)
            await rig.play_group("broken")
            await rig.until_version(2)
            await _until_exported(collector, 2)
        return Watched(collector=collector, scrapes=scrapes)


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


async def _restart_untraced(rig: RunRig) -> None:
    """The manager again, on its port, as one that does not pass the trace on with its samples."""
    manager = rig.processes["trajectory_manager"]
    await asyncio.to_thread(manager.stop)
    manager.module = "tests.system.deploy.monitoring.untraced_manager"
    await asyncio.to_thread(manager.start)


async def _until_exported(collector: Collector, version: int) -> None:
    limit = time.monotonic() + _WAIT_SECONDS
    while not (
        collector.named("swap", weight_version=version) and collector.named("step", step=version)
    ):
        assert time.monotonic() < limit, sorted(_names(collector.spans))
        await asyncio.sleep(0.05)


def _names(spans: list[SpanRecord]) -> set[tuple[str, str]]:
    return {(span.service.removeprefix("seamflow."), span.name) for span in spans}


def test_a_turn_is_connected_with_the_swap_of_the_weights_it_trained(watched: Watched) -> None:
    """Through gateway, server, manager, lease, optimizer step, publish."""
    turn, swap = watched.turn_and_swap("whole", 1)
    together = reached(watched.collector.spans, turn)
    assert swap in together
    assert _names(together) >= {
        ("rollout_gateway", "rollout"),
        ("rollout_gateway", "seamflow.rollout.v1.RolloutService/Generate"),
        ("rollout_server", "seamflow.rollout.v1.RolloutServerService/GenerateTokens"),
        ("trajectory_manager", "seamflow.trajectory.v1.TrajectoryService/BeginTurns"),
        ("trajectory_manager", "seamflow.trajectory.v1.TrajectoryService/AppendTokens"),
        ("trajectory_manager", "seamflow.trajectory.v1.SampleService/LeaseSamples"),
        ("trainer", "step"),
        ("trainer", "train"),
        ("trainer", "publish"),
        ("weights", "seamflow.weights.v1.WeightService/CommitPublish"),
        ("rollout_server", "update weights"),
    }


def test_the_trace_of_a_rollout_follows_from_its_name(watched: Watched) -> None:
    """Turns and the step's link are found by run and rollout id alone."""
    turn, _ = watched.turn_and_swap("whole", 1)
    trace_id, span_id = trace_context.ids(trace_context.of_rollout(RUN_ID, "whole/0/1"))
    assert turn.trace_id == trace_id
    (step,) = watched.collector.named("step", step=1)
    assert span_id in step.links


def test_without_propagation_by_the_samples_the_trace_is_broken(watched: Watched) -> None:
    """Negative control: the manager of step 2 gave the trainer no trace context."""
    turn, swap = watched.turn_and_swap("broken", 2)
    assert swap not in reached(watched.collector.spans, turn)


def test_every_metric_of_dashboards_and_alerts_is_exposed_by_a_process(watched: Watched) -> None:
    """All of them were scraped from the running processes."""
    exposed = _exposed(watched)
    wanted = {name for rule in rules() for name in metrics_in(rule["expr"])}
    for board in dashboards().values():
        targets = [target for panel in board["panels"] for target in panel["targets"]]
        wanted |= {name for target in targets for name in metrics_in(target["expr"])}
    assert len(wanted) > 30
    assert wanted - _OF_PROMETHEUS - exposed == set()


def test_a_metric_that_no_process_has_is_noticed(watched: Watched) -> None:
    """Negative control."""
    (name,) = metrics_in('sum by (le) (rate(seamflow_trainer_steps_bucket{phase="x"}[5m])) > 1')
    assert name not in _exposed(watched)


def _exposed(watched: Watched) -> set[str]:
    names: set[str] = set()
    for scrape in watched.scrapes.values():
        for line in scrape.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                names.add(name)
                if kind == "histogram":
                    names |= {name + suffix for suffix in _SUFFIXES}
    return names
