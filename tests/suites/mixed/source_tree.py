"""The trees of source that processes are started from: this one, and that of another release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from services.launcher.child_process import ProcessPlan

ROOT = Path(__file__).parents[3]
_PACKAGES = ("seamflow", "services", "trajectory_manager", "rollout", "scheduler", "trainer")
_WHERE = "import sys, importlib.util as u; print(*(u.find_spec(n).origin for n in sys.argv[1:]))"


@dataclass(frozen=True, kw_only=True)
class SourceTree:
    """One release of all services. Third-party packages are those of this environment."""

    name: str
    """For people: "present", or the git ref."""
    root: Path
    """The folder that pyproject.toml is in."""

    def environment(self) -> Mapping[str, str]:
        """Variables with which this Python imports the tree's code, and no other's."""
        path = os.pathsep.join((str(self.root / "sdk"), str(self.root)))
        # Without the second, `python -m` looks in the current folder first.
        return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}

    def started(self, plan: ProcessPlan, port_file: Path) -> ProcessPlan:
        """The same process with the same settings, from this tree, without those it has not got."""
        known = {name: value for name, value in plan.environment.items() if self._knows(name)}
        extra = {**self.environment(), "SEAMFLOW_PORT_FILE": str(port_file)}
        return replace(plan, environment={**known, **extra})

    def _knows(self, variable: str) -> bool:
        """Whether it has the setting of this variable, by its schema of all settings."""
        given = variable.removeprefix("SEAMFLOW_").lower()
        tables = [name for name in self._schema["properties"] if given.startswith(f"{name}_")]
        if not tables:
            return True  # no setting, or none of its processes
        known = self._schema["properties"][max(tables, key=len)]
        for part in given.removeprefix(f"{max(tables, key=len)}_").split("__"):
            if part not in known.get("properties", {}):
                return False
            known = known["properties"][part]
            known = self._schema["$defs"].get(known.get("$ref", "").rpartition("/")[2], known)
        return True

    @cached_property
    def _schema(self) -> dict[str, Any]:
        file = self.root / "docs" / "configuration.schema.json"
        schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return schema

    def check(self) -> None:
        """Start Python as a process of this tree is started, and see where its code is.

        Raises:
            RuntimeError: a package would be imported from elsewhere, or is missing.
        """
        done = subprocess.run(
            [sys.executable, "-c", _WHERE, *_PACKAGES],
            env={**os.environ, **self.environment()},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        found = done.stdout.split()
        if done.returncode or not all(Path(file).is_relative_to(self.root) for file in found):
            raise RuntimeError(
                f"release {self.name} would not run from {self.root}: {found or done.stderr}"
            )


def export(ref: str, folder: Path, repository: Path = ROOT) -> SourceTree:
    """The tree of a git tag or commit, unpacked in `folder`.

    Raises:
        ValueError: the repository has no such ref.
    """
    archive = subprocess.run(
        ["git", "archive", "--format=tar", ref], cwd=repository, capture_output=True, check=False
    )
    if archive.returncode:
        raise ValueError(
            f"release {ref!r} is not in this repository ({archive.stderr.decode().strip()}): "
            "run `git fetch --tags`, or name another with --release"
        )
    folder.mkdir(parents=True)
    unpack = ["tar", "--extract", "--directory", str(folder)]
    subprocess.run(unpack, input=archive.stdout, check=True)
    return SourceTree(name=ref, root=folder)


def changed_requirements(old: Path, new: Path = ROOT) -> list[str]:
    """Third-party requirements of two trees that differ, "- " before what the new one lacks."""
    ours, theirs = _requirements(new), _requirements(old)
    return [f"- {each}" for each in sorted(theirs - ours)] + [
        f"+ {each}" for each in sorted(ours - theirs)
    ]


def _requirements(root: Path) -> set[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project.get("optional-dependencies", {}).values()
    return {*project.get("dependencies", ()), *(each for group in optional for each in group)}
