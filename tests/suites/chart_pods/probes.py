"""Probes, asked and counted as kubelet does: from outside of the pod, at its address."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.lib.deploy.chart import Object
from tests.suites.chart_pods.pod import docker

_DEFAULTS = {"periodSeconds": 10, "timeoutSeconds": 1, "failureThreshold": 3}
_TICK_SECONDS = 0.5
_PARALLEL = 8


@dataclass(slots=True, kw_only=True)
class PodState:
    """What kubelet knows of a pod."""

    container: Object
    """As in its template."""
    address: str = ""
    """IP address; empty: it does not run."""
    started_at: str = ""
    """Of its present container."""
    is_started: bool = False
    is_ready: bool = False
    crashes: int = 0
    """Times its process ended by itself and was started again."""
    probe_kills: int = 0
    """Times its startup or liveness probe failed too often."""
    failures: Counter[str] = field(default_factory=Counter)
    """In a row, by probe."""
    due: dict[str, float] = field(default_factory=dict)
    """When each probe is asked next, in seconds of the monotonic clock."""

    def setting(self, probe: str, name: str) -> int:
        """Of `probe`, or the default of Kubernetes."""
        value: int = self.container[probe].get(name, _DEFAULTS[name])
        return value

    def due_probes(self, now: float) -> list[str]:
        """Until it has started, the startup probe alone."""
        names = ["livenessProbe", "readinessProbe"] if self.is_started else ["startupProbe"]
        return [name for name in names if self.address and self.due.get(name, 0.0) <= now]


class Prober:
    """Asks the probes of all pods that it was given, in a thread, within a `with` block."""

    def __init__(self) -> None:
        self._states: dict[str, PodState] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Prober:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End."""
        self._ended.set()
        self._thread.join()

    def add(self, name: str, container: Object) -> None:
        """Ask this pod from now on."""
        with self._lock:
            self._states[name] = PodState(container=container)

    def remove(self, name: str) -> PodState:
        """Ask it no more; returns what was known of it."""
        with self._lock:
            return self._states.pop(name)

    def states(self) -> dict[str, PodState]:
        """All pods by name."""
        with self._lock:
            return dict(self._states)

    def _work(self) -> None:
        with ThreadPoolExecutor(_PARALLEL) as pool:
            while not self._ended.wait(_TICK_SECONDS):
                states = self.states()
                if not states:
                    continue
                _look_up(states)
                now = time.monotonic()
                asked = [(n, s, p) for n, s in states.items() for p in s.due_probes(now)]
                list(pool.map(lambda each: _ask(*each), asked))


def _look_up(states: dict[str, PodState]) -> None:
    """Addresses, and which containers are new ones."""
    for found in _inspected(states):
        state = states[found["Name"].lstrip("/")]
        running = found["State"]["Running"] and not found["State"]["Restarting"]
        (network,) = found["NetworkSettings"]["Networks"].values()
        state.address = network["IPAddress"] if running else ""
        state.crashes = found["RestartCount"]
        if found["State"]["StartedAt"] != state.started_at or not running:
            state.started_at = found["State"]["StartedAt"]
            state.is_started = state.is_ready = False
            state.failures.clear()


def _inspected(names: Iterable[str]) -> list[Object]:
    try:
        found: list[Object] = json.loads(docker("inspect", *names))
    except RuntimeError:  # one has been removed meanwhile
        return []
    return found


def _ask(name: str, state: PodState, probe: str) -> None:
    """Ask one probe, and do what follows from its answer."""
    state.due[probe] = time.monotonic() + state.setting(probe, "periodSeconds")
    get = state.container[probe]["httpGet"]
    ports = {port["name"]: port["containerPort"] for port in state.container["ports"]}
    timeout = state.setting(probe, "timeoutSeconds")
    status = status_of(state.address, ports[get["port"]], get["path"], timeout)
    if status is not None and 200 <= status < 400:
        _succeeded(state, probe)
    else:
        _failed(name, state, probe)


def _succeeded(state: PodState, probe: str) -> None:
    state.failures[probe] = 0
    if probe == "startupProbe":
        state.is_started = True
    elif probe == "readinessProbe":
        state.is_ready = True


def _failed(name: str, state: PodState, probe: str) -> None:
    state.failures[probe] += 1
    if state.failures[probe] < state.setting(probe, "failureThreshold"):
        return
    if probe == "readinessProbe":
        state.is_ready = False
    else:
        state.probe_kills += 1
        docker("restart", name)


def status_of(address: str, port: int, path: str, timeout: float) -> int | None:
    """HTTP status of a page; None: no answer."""
    connection = http.client.HTTPConnection(address, port, timeout=timeout)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
