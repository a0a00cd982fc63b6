"""A pod is ended as kubelet ends it, and asked whether it is ready until it is gone."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from tests.suites.chart_pods.cluster import Cluster
from tests.suites.chart_pods.pod import docker, stop
from tests.suites.chart_pods.probes import status_of

_ADMIN_PORT = 9100
_PAUSE_SECONDS = 0.02
_TURNS = re.compile(r"^seamflow_\w+_rpc_in_flight\{method=\"\S+/Generate\"\} (\S+)$", re.MULTILINE)
_NOT_READY, _READY = 503, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """How a pod ended."""

    exit_code: int
    """0: by itself; 137: killed after its grace period."""
    seconds: float
    """From SIGTERM to its end."""
    was_not_ready: bool
    """Its readiness probe was seen to fail while it still answered."""
    was_ready_again: bool
    """And to succeed afterwards, which must not be."""


def drained(
    release: Cluster, name: str, on_not_ready: Callable[[], object] | None = None
) -> Drained:
    """The pod's preStop command, SIGTERM, then SIGKILL after the grace period."""
    address = release.prober.states()[name].address
    ending = threading.Thread(target=stop, args=(release.pods[name], name))
    began = time.monotonic()
    ending.start()
    seen: list[int] = []
    while ending.is_alive():
        status = status_of(address, _ADMIN_PORT, "/readyz", timeout=1.0)
        if status == _NOT_READY and _NOT_READY not in seen and on_not_ready is not None:
            on_not_ready()
        seen += [] if status is None else [status]
        time.sleep(_PAUSE_SECONDS)
    ending.join()
    state = json.loads(docker("inspect", "--format", "{{json .State}}", name))
    after = seen[seen.index(_NOT_READY) :] if _NOT_READY in seen else []
    return Drained(
        exit_code=state["ExitCode"],
        seconds=time.monotonic() - began,
        was_not_ready=bool(after),
        was_ready_again=_READY in after,
    )


def busy(release: Cluster, name: str) -> bool:
    """Whether turns are under way in the pod."""
    address = release.prober.states()[name].address
    with urllib.request.urlopen(f"http://{address}:{_ADMIN_PORT}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in _TURNS.findall(text)) > 0
