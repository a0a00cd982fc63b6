"""Environments that have exactly what a page says was installed, each with a home of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.suites.readme.pages import ROOT, Listed, fence

_TORCH = "torch==2.13.0"
_KEPT = ("PIP_", "SSL_", "REQUESTS_", "HTTP_", "HTTPS_", "NO_PROXY", "http_", "https_", "no_proxy")
"""How packages are reached from here; nothing else of this shell is known there."""
_TRACED = 'trap \'printf "%s\\n" "$BASH_COMMAND" >> "$COMMANDS"\' DEBUG\nset -eo pipefail\n'
"""Writes down each command before it runs; the block ends with the first that fails."""


@dataclass(frozen=True, slots=True)
class Done:
    """A script that has ended."""

    code: int
    """Its exit code."""
    commands: Sequence[str]
    """Those that it began."""


def build_wheel(root: Path) -> tuple[Path, Path]:
    """A clean clone of this repository, and the wheel of it."""
    clone = root / "repository"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(root / "dist")]
    subprocess.run(command, cwd=clone, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = (root / "dist").glob("*.whl")
    return clone, wheel


class Home:
    """An empty home, an environment and a folder to work in.

    Args:
        folder: is made.
        clone: what the pages clone.
        wheel: what they install.
        cache: of pip, so that nothing is fetched twice.
    """

    def __init__(self, folder: Path, clone: Path, wheel: Path, cache: Path) -> None:
        self.work, self._folder = folder / "work", folder
        for each in (self.work, folder / "home", folder / "tmp"):
            each.mkdir(parents=True)
        base = getattr(sys, "_base_executable", sys.executable)
        subprocess.run([base, "-m", "venv", str(folder / "env")], check=True)
        kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
        self._variables = {
            **kept,
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "PATH": f"{folder / 'env/bin'}:{Path(base).parent}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PIP_CACHE_DIR": str(cache),
            "COMMANDS": str(folder / "commands"),
            "WHEEL": str(wheel),
            "REPOSITORY": str(clone),
        }

    def install(self, wanted: Sequence[str]) -> None:
        """Install "torch" (the build for CPUs, as README.md has it) and "wheel:EXTRA"."""
        wheel = self._variables["WHEEL"]
        for each in wanted:
            kind, _, extra = each.partition(":")
            package = _TORCH if kind == "torch" else f"{wheel}[{extra}]"
            done = self.run(f"python -m pip install --quiet '{package}'", 3600)
            assert done.code == 0, f"{package} cannot be installed"

    def prepare(self, row: Listed) -> None:
        """Make the files of a row, and what its user has."""
        for name, block in row.files.items():
            file = self.work / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(fence(block), encoding="utf-8")
        done = self.run(row.setup, 3600)
        assert done.code == 0, f"setup ends with {done.code} after {done.commands[-1:]}"

    def run(self, script: str, seconds: float, modules: bool = False) -> Done:
        """Run a script of bash to its end, at most for `seconds`.

        `modules`: with the folder of the services in the wheel on Python's path, as images have it.
        """
        commands = self._folder / "commands"
        commands.write_text("")
        paths = [str(each) for each in self._folder.glob("env/lib/python3*/site-packages")]
        services = {"PYTHONPATH": f"{paths[0]}/seamflow/_services"} if modules else {}
        process = subprocess.Popen(
            ["bash", "-c", _TRACED + script],
            cwd=self.work,
            env={**self._variables, **services},
            stdin=subprocess.DEVNULL,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            code = 124
        said = commands.read_text(encoding="utf-8").splitlines()
        return Done(code, [line for line in said if not line.startswith("set -eo")])
