"""The Helm chart, rendered by Helm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "seamflow"
EXAMPLES = {"defaults": None} | {
    path.stem: path for path in sorted((ROOT / "deploy" / "helm" / "examples").glob("*.yaml"))
}
_HELM = Path(sys.executable).with_name("helm")

Object = dict[str, Any]


def render(
    values: Path | None = None, given: Mapping[str, object] = MappingProxyType({})
) -> list[Object]:
    """All objects of a release; `given` are further values, by name."""
    command = [str(_HELM), "template", "test", str(CHART), "--namespace", "training"]
    command += ["--values", str(values)] if values is not None else []
    for name, value in given.items():
        command += ["--set-json", f"{name}={json.dumps(value)}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Name and pod template of each workload."""
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            name = each["metadata"]["name"]
            if each["kind"] == "Job":
                name = name.rpartition("-")[0]  # without the digest of its pod
            yield name, each["spec"]["template"]


def containers(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Name of the workload and container, of all workloads."""
    for name, template in pods(objects):
        for container in template["spec"]["containers"]:
            yield name, container


def environment(container: Mapping[str, Any], pod_name: str) -> dict[str, str]:
    """Variables as Kubernetes would set them in the pod `pod_name`."""
    found: dict[str, str] = {}
    for each in container.get("env", ()):
        value = each.get("value", pod_name)
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        found[each["name"]] = value
    return found
