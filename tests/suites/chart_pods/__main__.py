"""`make test-chart-pods`: the pods that the Helm chart renders, run as containers.

Commands, variables, volumes, users, confinement, limits of memory and probes are those of the
rendered templates; Docker stands for kubelet and gives Services their names. There is no cluster:
nothing here schedules, watches objects, applies network policies or scales.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from seamflow.release import __version__

from bench.report import Report
from deploy import containers
from tests.suites.chart_pods import pod
from tests.suites.chart_pods.cluster import AGENT, REDIS, Cluster, cluster
from tests.suites.chart_pods.drain import Drained, busy, drained
from tests.suites.chart_pods.pod import NETWORK, docker
from tests.suites.compose.base_images import base_images
from tests.suites.compose.engine import EngineUnavailableError, engine
from tests.suites.compose.images import gigabytes_of_engine

STEPS = 2
_WAIT_SECONDS = 600.0
_POLL_SECONDS = 1.0
_CONFINED = """
import os, pathlib
status = dict(line.split(":\\t", 1) for line in open("/proc/1/status") if ":\\t" in line)
try:
    pathlib.Path("/written").touch()
    is_read_only = False
except OSError:
    is_read_only = True
print(is_read_only, int(status["CapEff"], 16), int(status["NoNewPrivs"]), os.getuid())
"""
_LINES = """
import pathlib
file = pathlib.Path("/state/evaluation.jsonl")
print(file.read_text() if file.exists() else "", end="")
"""
_console = Console()


def main() -> int:
    """Run it all; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path, default=Path("/var/tmp/seamflow-test-compose"))
    parser.add_argument("--no-build", action="store_true", help="take the images that are there")
    given = parser.parse_args()
    try:
        with engine(given.data_root):
            figures = _drill(given.data_root, not given.no_build)
    except EngineUnavailableError as error:
        sys.stderr.write(f"test-chart-pods: {error}\n")
        return 69
    Report(bench="chart-pods", figures=figures, packages=("seamflow", "helm-binary")).publish()
    return 0


def _drill(data_root: Path, build: bool) -> dict[str, float]:
    with base_images(data_root) as images:
        os.environ.update(images)
        built = _built() if build else {}
    with tempfile.TemporaryDirectory(dir=data_root) as folder:
        Path(folder).chmod(0o755)
        with cluster(Path(folder)) as release:
            return {
                **built,
                **_installed(release),
                **_confined(release),
                **_trained(release),
                **_evaluated(release),
                **_agent(release, Path(folder)),
                **_store_outage(release),
                **_deleted(release),
                **_unconfined(release),
            }


def _built() -> dict[str, float]:
    """The image of each service, and that of the node pools, on bases that are built once."""
    began = time.monotonic()
    containers.build_images(quiet=True)
    seconds = time.monotonic() - began
    return {"seconds_to_build": seconds, "gigabytes_of_all_images": gigabytes_of_engine()}


def _installed(release: Cluster) -> dict[str, float]:
    """Everything at once, as a release is installed: each pod becomes ready, each job ends."""
    began = time.monotonic()
    for workload in release.workloads.values():
        for name in workload.pod_names():
            release.start(workload, name)
    _wait_for("all pods", lambda: not release.not_ready())
    states = release.prober.states().values()
    return {
        "pods_ready": float(len(states)),
        "jobs_done": float(len(release.pods) - len(states)),
        "seconds_to_ready": time.monotonic() - began,
        "crashes_while_starting": float(sum(state.crashes for state in states)),
        "probe_kills_while_starting": float(sum(state.probe_kills for state in states)),
    }


def _confined(release: Cluster) -> dict[str, float]:
    """Seen from inside: a root that cannot be written, no capability, none to gain, not root."""
    names = list(release.prober.states())
    wrong = {name: seen for name in names if (seen := _seen_inside(name)) != "True 0 1 10001"}
    assert not wrong, wrong
    return {"pods_confined": float(len(names))}


def _seen_inside(name: str) -> str:
    return docker("exec", name, "python", "-c", _CONFINED)


def _unconfined(release: Cluster) -> dict[str, float]:
    """Control: without its security context a pod is seen to be open."""
    workload = release.workloads["seamflow-tool-loop"]
    name = workload.new_pod_name()
    pod.run(workload, name, release.volumes, confined=False)
    release.pods[name] = workload
    seen = _seen_inside(name)
    assert seen != "True 0 1 10001", seen
    return {"control_unconfined_pods_found": 1.0}


def _trained(release: Cluster) -> dict[str, float]:
    """The pods find each other by the names of Services, over TLS, and train."""
    wanted = _steps(release) + STEPS
    began = time.monotonic()
    _wait_for(f"optimizer step {wanted}", lambda: _steps(release) >= wanted)
    return {"steps_trained": float(_steps(release)), "seconds_to_steps": time.monotonic() - began}


def _evaluated(release: Cluster) -> dict[str, float]:
    """The first weights before the first step, and later ones beside training."""
    (name,) = release.pods_of("evaluator")
    began = time.monotonic()
    _wait_for("a second evaluation", lambda: len(_evaluations(name)) > 1)
    first, *_ = _evaluations(name)
    assert first["label"] == "before", first
    return {
        "evaluations": float(len(_evaluations(name))),
        "seconds_to_evaluations": time.monotonic() - began,
    }


def _evaluations(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in docker("exec", name, "python", "-c", _LINES).splitlines()]


def _steps(release: Cluster) -> int:
    file = release.data / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def _agent(release: Cluster, folder: Path) -> dict[str, float]:
    """An agent with its own certificate and token, through the gateway's Service."""
    docker(
        *(
            "run",
            "--rm",
            "--network",
            NETWORK,
            "--no-healthcheck",
            "--read-only",
            "--tmpfs",
            "/tmp",
        ),
        *("--mount", f"type=bind,source={folder / AGENT},target=/agent,readonly"),
        *(f"seamflow/dataloader:{__version__}", "examples.minimal_agent"),
        *("seamflow-rollout-gateway:50052", "run", "/agent"),
    )
    return {"agent_rollouts": 1.0}


def _store_outage(release: Cluster) -> dict[str, float]:
    """While Redis stands still its users are alive and not ready; nothing is restarted for it."""
    users = release.pods_of("trajectory-manager", "scheduler", "weights")
    before = _restarts(release)
    docker("pause", REDIS)
    try:
        _wait_for("pods without their store", lambda: set(users) <= set(release.not_ready()))
    finally:
        docker("unpause", REDIS)
    _wait_for("pods with their store", lambda: not release.not_ready())
    assert _restarts(release) == before, "an outage of Redis restarted a pod"
    return {"pods_not_ready_without_redis": float(len(users))}


def _restarts(release: Cluster) -> dict[str, int]:
    states = release.prober.states().items()
    return {name: state.crashes + state.probe_kills for name, state in states}


def _deleted(release: Cluster) -> dict[str, float]:
    """Delete each pod in turn: it drains, ends by itself, and another becomes ready."""
    found: dict[str, Drained] = {}
    for name in list(release.prober.states()):
        found[name] = drained(release, name)
        new = release.replace(name)
        with _console.status(f"{name} -> {new}"):
            _wait_for(f"the pod after {name}", lambda: not release.not_ready())
    unclean = {name: each.exit_code for name, each in found.items() if each.exit_code != 0}
    assert not unclean, unclean
    back = [name for name, each in found.items() if each.was_ready_again]
    assert not back, f"ready while draining: {back}"
    open_turns = _drained_with_turns(release)
    steps = _trained(release)["steps_trained"]
    return {
        "pods_deleted": float(len(found)),
        "pods_ended_with_0": float(len(found)),
        "pods_seen_not_ready_while_draining": float(
            sum(each.was_not_ready for each in found.values())
        ),
        "seconds_to_drain_most": max(each.seconds for each in found.values()),
        **open_turns,
        "steps_trained_after_deletions": steps,
    }


def _drained_with_turns(release: Cluster) -> dict[str, float]:
    """A gateway with turns under way: not ready at once, and gone when they have ended."""
    nodes, gateways = release.pods_of("rollout", "train"), release.pods_of("rollout-gateway")
    docker("pause", *nodes)  # so that the turns last
    try:
        _wait_for("turns", lambda: any(busy(release, name) for name in gateways))
        name = next(each for each in gateways if busy(release, each))
        seen = drained(release, name, partial(docker, "unpause", *nodes))
    except BaseException:
        docker("unpause", *nodes)
        raise
    assert seen.was_not_ready and not seen.was_ready_again, seen
    assert seen.exit_code == 0, seen
    release.replace(name)
    _wait_for("the gateway's next pod", lambda: not release.not_ready())
    return {"seconds_to_drain_with_turns": seen.seconds}


def _wait_for(what: str, is_done: Callable[[], bool]) -> None:
    limit = time.monotonic() + _WAIT_SECONDS
    while not is_done():
        if time.monotonic() > limit:
            raise TimeoutError(f"{what}: not within {_WAIT_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
