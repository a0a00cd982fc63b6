"""A pod of the chart as one container: what kubelet makes of its template, made by Docker."""

from __future__ import annotations

import re
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.lib.deploy.chart import Object, environment
from tests.suites.chart_pods.volumes import Volumes

NETWORK = "seamflow-pods"
NAMESPACE = "training"
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
# What a pod has and one container on one machine needs not: the scheduler's and the cluster's part.
_OF_THE_CLUSTER = {"serviceAccountName", "automountServiceAccountToken", "enableServiceLinks"}
_OF_THE_CLUSTER |= {"nodeSelector", "tolerations", "affinity"}
_SPEC = _OF_THE_CLUSTER | {"containers", "volumes", "securityContext", "restartPolicy"}
_SPEC |= {"terminationGracePeriodSeconds"}
_CONTAINER = {"name", "image", "imagePullPolicy", "args", "env", "ports", "securityContext"}
_CONTAINER |= {"resources", "volumeMounts", "startupProbe", "livenessProbe", "readinessProbe"}
_CONTAINER |= {"lifecycle"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A Deployment, StatefulSet or Job."""

    kind: str
    name: str
    spec: Object
    hosts: tuple[str, ...]
    """Names of the Services that select its pods."""

    @property
    def template(self) -> Object:
        """Of its pods."""
        template: Object = self.spec["template"]
        return template

    @property
    def container(self) -> Object:
        """The one container of a pod."""
        (container,) = self.template["spec"]["containers"]
        found: Object = container
        return found

    def pod_names(self) -> list[str]:
        """A name for each replica: numbered in a StatefulSet, else random."""
        numbers = range(self.spec.get("replicas", 1))
        if self.kind == "StatefulSet":
            return [f"{self.name}-{number}" for number in numbers]
        return [self.new_pod_name() for _ in numbers]

    @property
    def serves(self) -> bool:
        """Whether it has probes, as all but the job that creates the run."""
        return "livenessProbe" in self.container

    def new_pod_name(self) -> str:
        """A random one, as a Deployment gives."""
        return f"{self.name}-{secrets.token_hex(4)}"


def workloads(objects: list[Object]) -> Iterator[Workload]:
    """All workloads of a release."""
    services = [each for each in objects if each["kind"] == "Service"]
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            template = each["spec"]["template"]
            labels = template["metadata"]["labels"]
            chosen = [s for s in services if s["spec"]["selector"].items() <= labels.items()]
            for service in chosen:
                _check_ports(service, template)
            names = tuple(service["metadata"]["name"] for service in chosen)
            name = each["metadata"]["name"]
            name = name.rpartition("-")[0] if each["kind"] == "Job" else name  # without its digest
            yield Workload(kind=each["kind"], name=name, spec=each["spec"], hosts=names)


def _check_ports(service: Object, template: Object) -> None:
    """A Service is a name of its pods here: its ports must be theirs."""
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for port in service["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"], service["metadata"]["name"]


def run(workload: Workload, pod_name: str, volumes: Volumes, *, confined: bool = True) -> None:
    """Start a pod; without `confined` nothing of its security context applies (for a control)."""
    spec, container = workload.template["spec"], workload.container
    unknown = (spec.keys() - _SPEC) | (container.keys() - _CONTAINER)
    assert not unknown, f"{workload.name}: {unknown} would be ignored here"
    claims = workload.spec.get("volumeClaimTemplates", [])
    docker(
        *("run", "--detach", "--name", pod_name, "--hostname", pod_name, "--no-healthcheck"),
        *("--network", NETWORK, *_aliases(workload, pod_name)),
        *("--restart", _restart_policy(workload)),
        *("--stop-timeout", str(spec["terminationGracePeriodSeconds"])),
        *("--memory", str(_bytes(container["resources"]["limits"]["memory"]))),
        *(_confinement(spec["securityContext"], container["securityContext"]) if confined else ()),
        *_environment(container, pod_name),
        *volumes.arguments(workload.template, pod_name, claims),
        container["image"],
        *map(str, container["args"]),
    )


def stop(workload: Workload, pod_name: str) -> None:
    """End a pod as kubelet does: its preStop command, then SIGTERM, then SIGKILL."""
    hook = workload.container.get("lifecycle", {}).get("preStop")
    if hook is not None:
        docker("exec", pod_name, *map(str, hook["exec"]["command"]))
    docker("stop", pod_name)


def _aliases(workload: Workload, pod_name: str) -> Iterator[str]:
    for service in workload.hosts:
        names = [service, f"{service}.{NAMESPACE}.svc"]
        if workload.spec.get("serviceName") == service:
            names += [f"{pod_name}.{service}", f"{pod_name}.{service}.{NAMESPACE}.svc"]
        for name in names:
            yield from ("--network-alias", name)


def _restart_policy(workload: Workload) -> str:
    if workload.kind == "Job":
        return f"on-failure:{workload.spec['backoffLimit']}"
    return "always"


def _confinement(pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    yield from ("--user", f"{pod['runAsUser']}:{pod['runAsGroup']}")
    yield from ("--group-add", str(pod["fsGroup"]))
    if container["readOnlyRootFilesystem"]:
        yield "--read-only"
    for capability in container["capabilities"]["drop"]:
        yield from ("--cap-drop", capability)
    if not container["allowPrivilegeEscalation"]:
        yield from ("--security-opt", "no-new-privileges:true")


def _environment(container: Object, pod_name: str) -> Iterator[str]:
    for name, value in environment(container, pod_name).items():
        yield from ("--env", f"{name}={value}")


def _bytes(quantity: str) -> int:
    found = re.fullmatch(r"(\d+)(Ki|Mi|Gi)", quantity)
    assert found, quantity
    return int(found[1]) * _UNITS[found[2]]


def docker(*arguments: str) -> str:
    """What a command of Docker prints.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"docker {' '.join(arguments[:4])} …: {done.stderr.strip()}")
    return done.stdout.strip()
