"""`make test-readme`: the pages' commands where only what the page installs is there.

`--only wheel smollm2` runs the blocks of these homes, `--only extras` what each extra starts.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.report import RESULTS, Report
from tests.suites.readme.homes import Home, build_wheel
from tests.suites.readme.pages import Listed, commands_of, listed, mistakes, pages

_BLOCK_SECONDS = 3600.0
_EXTRAS = "extras"
_WITH_TORCH = (
    "gguf",
    "quickstart",
    "ranker-language-model",
    "rollout-server",
    "scoring",
    "sglang",
    "trainer",
)
"""Extras that bring torch: the default index has it with CUDA, 3 GB, so it is installed before."""


class Suite:
    """Runs blocks and extras, and counts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._clone, self._wheel = build_wheel(root)
        self._homes: dict[str, Home] = {}
        self.figures: dict[str, float] = {"blocks": 0, "commands": 0, "failed": 0}
        self.failures: list[str] = []

    def block(self, row: Listed) -> None:
        """Run a block that is listed."""
        began = time.monotonic()
        home = self._homes.get(row.home) or self._made(row.home, row.environment)
        home.prepare(row)
        script = _script(row)
        for old, new in row.replace:
            script = script.replace(old, new)
        self.figures["blocks"] += 1
        self._run(home, f"{row.page}, {row.starts or row.command}", script)
        for name in row.makes:
            if not (home.work / name).exists():
                self._failed(f"{row.page}: {name} is not there after {row.starts or row.command}")
        self.figures[f"minutes.{row.home}"] = (
            self.figures.get(f"minutes.{row.home}", 0.0) + (time.monotonic() - began) / 60
        )

    def extra(self, name: str, commands: Sequence[str]) -> None:
        """Start each command of an extra, alone in its environment."""
        torch = ["torch"] if name in _WITH_TORCH else []
        home = self._made(f"extra-{name}", [*torch, f"wheel:{name}"])
        for command in commands:
            self._run(home, f"extra {name}", f"{command} > /dev/null", modules="-m" in command)
        shutil.rmtree(self._root / f"extra-{name}")
        self.figures["extras"] = self.figures.get("extras", 0) + 1

    def _made(self, name: str, environment: Sequence[str]) -> Home:
        cache = self._root / "pip"
        home = Home(self._root / name, self._clone, self._wheel, cache)
        home.install(environment)
        self._homes[name] = home
        return home

    def _run(self, home: Home, what: str, script: str, *, modules: bool = False) -> None:
        print(f"== {what}", flush=True)
        done = home.run(script, _BLOCK_SECONDS, modules)
        self.figures["commands"] += len(done.commands)
        if done.code:
            last = done.commands[-1] if done.commands else script
            self._failed(f"{what}: {last!r} ended with {done.code}")

    def _failed(self, line: str) -> None:
        self.figures["failed"] += 1
        self.failures.append(line)
        print(f"FAILED {line}", flush=True)


def _script(row: Listed) -> str:
    if row.command:
        return row.command
    (block,) = [each for each in commands_of(pages()) if row.is_of(each)]
    if block.language != "console":
        return block.text
    lines = (line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ "))
    return "\n".join(lines)


def run(only: Sequence[str], root: Path) -> tuple[Mapping[str, float], Sequence[str]]:
    """Figures and failures; of all homes and extras where `only` is empty."""
    rows, extras = listed()
    suite = Suite(root)
    suite.failures += mistakes(rows, list(pages()))
    suite.figures["failed"] += len(suite.failures)
    for row in rows:
        if not row.skip and (not only or row.home in only):
            suite.block(row)
    for name, commands in extras.items():
        if isinstance(commands, list) and (not only or {_EXTRAS, name} & {*only}):
            suite.extra(name, commands)
    suite.figures["blocks_skipped"] = sum(bool(row.skip) for row in rows)
    return suite.figures, suite.failures


def main() -> None:
    """Run all, print and write the figures; exit 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="homes, extras, or extra names")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seamflow-readme-") as folder:
        figures, failures = run(given.only, Path(folder))
    for line in failures:
        print(line)
    report = Report(bench="test-readme", figures=figures, packages=("hatchling",))
    report.show() if given.only else report.publish(RESULTS)
    raise SystemExit(1 if figures["failed"] else 0)


if __name__ == "__main__":
    main()
