"""What the chart expects to exist: secrets, Redis, model and tasks; and pods that come back."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from examples.quickstart.prepare import build_model, build_tokenizer
from tests.lib.certificates import Authority
from tests.lib.deploy.chart import EXAMPLES, Object, render
from tests.suites.chart_pods import pod
from tests.suites.chart_pods.pod import NETWORK, Workload, docker
from tests.suites.chart_pods.probes import Prober
from tests.suites.chart_pods.volumes import Volumes, share

VALUES = EXAMPLES["cpu"]
CLAIM, MODEL, TASKS, HELDOUT = "seamflow-data", "model", "tasks.jsonl", "heldout.jsonl"
REDIS = "seamflow-redis"
AGENT = "agent"
_ENDLESS = {"trainer.settings.num_steps": 1_000_000}
_GROUP = 10001
_STORES = ("trajectory-manager", "weights", "scheduler")
_TASKS = 64
_HELDOUT_TASKS = 8


class Cluster:
    """The pods of one release."""

    def __init__(self, volumes: Volumes, prober: Prober, workloads: list[Workload]) -> None:
        self.volumes = volumes
        self.prober = prober
        self.workloads = {each.name: each for each in workloads}
        self.pods: dict[str, Workload] = {}

    @property
    def data(self) -> Path:
        """The data volume."""
        return self.volumes.claim(CLAIM)

    def start(self, workload: Workload, pod_name: str) -> None:
        """Run a pod; one that does its work and ends has no probes."""
        pod.run(workload, pod_name, self.volumes)
        self.pods[pod_name] = workload
        if workload.serves:
            self.prober.add(pod_name, workload.container)

    def replace(self, pod_name: str) -> str:
        """A new pod for one that has ended; returns its name."""
        workload = self.pods.pop(pod_name)
        self.prober.remove(pod_name)
        docker("rm", pod_name)
        shutil.rmtree(self.volumes.folder / "pods" / pod_name)
        stateful = workload.kind == "StatefulSet"
        name = pod_name if stateful else workload.new_pod_name()
        self.start(workload, name)
        return name

    def pods_of(self, *services: str) -> list[str]:
        """Names of the pods of workloads, without the release's name."""
        names = {f"seamflow-{service}" for service in services}
        return sorted(pod for pod, workload in self.pods.items() if workload.name in names)

    def not_ready(self) -> list[str]:
        """Pods that are not, and jobs that have not ended well."""
        states = self.prober.states()
        jobs = [n for n, w in self.pods.items() if not (w.serves or _has_succeeded(n))]
        return jobs + [name for name, state in states.items() if not state.is_ready]

    def show_failures(self) -> None:
        """The last words of pods that are not ready, on stderr."""
        for name in self.not_ready():
            state = docker("inspect", "--format", "{{json .State}}", name)
            sys.stderr.write(f"{name}: {state}\n")
            subprocess.run(["docker", "logs", "--tail", "5", name], stdout=sys.stderr, check=False)


def _has_succeeded(name: str) -> bool:
    return (
        docker("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", name) == "exited 0"
    )


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A namespace with all that the release needs, and none of its pods yet."""
    objects = render(VALUES, _ENDLESS)
    config_maps = {e["metadata"]["name"]: e["data"] for e in objects if e["kind"] == "ConfigMap"}
    volumes = Volumes(folder=folder, config_maps=config_maps, secrets=_secrets(folder))
    _make_data(volumes.claim(CLAIM))
    _clear()  # of a run that was killed
    docker("network", "create", NETWORK)
    try:
        _run_redis(folder, volumes.secrets["seamflow-redis"]["password"].decode())
        with Prober() as prober:
            made = Cluster(volumes, prober, list(pod.workloads(objects)))
            try:
                yield made
            finally:
                made.show_failures()
    finally:
        _clear()


def _clear() -> None:
    """Remove the network and all that is in it."""
    if docker("network", "ls", "--quiet", "--filter", f"name={NETWORK}"):
        names = docker("ps", "--all", "--quiet", "--filter", f"network={NETWORK}").split()
        if names:
            docker("rm", "--force", "--volumes", *names)
        docker("network", "rm", NETWORK)


def _secrets(folder: Path) -> dict[str, dict[str, bytes]]:
    """Those that the operator makes, and those that cert-manager would make of Certificates."""
    authority = Authority(folder)
    objects = render(VALUES, {"certificates.certManager": True})
    made = {
        each["spec"]["secretName"]: _issued(authority, each["spec"])
        for each in objects
        if each["kind"] == "Certificate"
    }
    tokens = ("agent_token", "operator_token", "credential_secret", "console_access_token")
    made["seamflow-tokens"] = {name: secrets.token_urlsafe(32).encode() for name in tokens}
    password = secrets.token_urlsafe(32)
    url = f"redis://:{password}@{REDIS}:6379/0".encode()
    made["seamflow-redis"] = {**dict.fromkeys(_STORES, url), "password": password.encode()}
    _write_credential(folder / AGENT, authority, made["seamflow-tokens"]["agent_token"])
    return made


def _issued(authority: Authority, spec: Object) -> dict[str, bytes]:
    (uri,) = spec["uris"]
    issued = authority.issue(spec["secretName"], uri, hosts=spec["dnsNames"])
    return {
        "ca.crt": issued.ca_file.read_bytes(),
        "tls.crt": issued.cert_file.read_bytes(),
        "tls.key": issued.key_file.read_bytes(),
    }


def _write_credential(folder: Path, authority: Authority, token: bytes) -> None:
    """As agents read it: `Credentials.from_folder`."""
    share(folder, _GROUP)
    issued = authority.issue("agent", "spiffe://seamflow/agent")
    files: Mapping[str, bytes] = {
        "token": token,
        "ca.pem": issued.ca_file.read_bytes(),
        "cert.pem": issued.cert_file.read_bytes(),
        "key.pem": issued.key_file.read_bytes(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o640)
        os.chown(folder / name, -1, _GROUP)


def _make_data(folder: Path) -> None:
    """A model that has learned nothing, and tasks for the tool loop."""
    share(folder, _GROUP)
    tokenizer = build_tokenizer()
    build_model(len(tokenizer), seed=0).save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    lines = [
        json.dumps({"task_id": f"floor-{n}", "payload": {"question": f"at {n}", "answer": str(n)}})
        for n in range(_TASKS)
    ]
    (folder / TASKS).write_text("\n".join(lines) + "\n")
    (folder / HELDOUT).write_text("\n".join(lines[:_HELDOUT_TASKS]) + "\n")


def _run_redis(folder: Path, password: str) -> None:
    """The operator's own, as durable as the run demands."""
    file = folder / "redis.conf"
    lines = (
        "dir /data",
        "appendonly yes",
        "appendfsync always",
        'save ""',
        f"requirepass {password}",
    )
    file.write_text("\n".join((*lines, "maxmemory-policy noeviction\n")))
    docker(
        *("run", "--detach", "--name", REDIS, "--network", NETWORK, "--no-healthcheck"),
        *("--mount", f"type=bind,source={file},target=/etc/redis.conf,readonly"),
        *("--entrypoint", "redis-server", os.environ["REDIS_IMAGE"], "/etc/redis.conf"),
    )
