"""`make test-environments`: the suite of each adapter, then a training run on its framework.

The venvs are made by the target. An adapter whose tests are skipped counts as a failure here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.report import Report
from tests.suites.environments.training.framework_run import STEPS, train
from tests.suites.environments.training.frameworks import FRAMEWORKS, Framework
from tools.provenance import ROOT

_SUITES = (
    "tests/system/services/environments/contract",
    "tests/system/services/environments/self_driving",
)
_CONTROLS = "broken or forgets"


def main() -> None:
    """Run all and report."""
    parser = argparse.ArgumentParser(prog="tests.suites.environments", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=tuple(FRAMEWORKS), default=tuple(FRAMEWORKS))
    parser.add_argument("--folder", type=Path, help="keep logs and records here")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    raw: dict[str, Sequence[float]] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="seamflow-environments-") as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        for name in options.only:
            found, rewards, wrong = _framework(FRAMEWORKS[name], folder / name, options.seed)
            figures |= {f"{name}.{figure}": value for figure, value in found.items()}
            raw[f"{name}.reward_mean"] = rewards
            problems += [f"{name}: {each}" for each in wrong]
        controls = _suite(_CONTROLS, folder)
        figures["negative_controls"] = controls["passed"]
        problems += [f"controls: {controls['failed']:g} failed"] if controls["failed"] else []
    peers = {name: _versions(FRAMEWORKS[name]) for name in options.only}
    report = Report(
        bench="environments", figures=figures, raw=raw, seeds=[options.seed], peers=peers
    )
    report.publish() if set(options.only) == set(FRAMEWORKS) else report.show()
    if problems:
        sys.exit("; ".join(problems))


def _framework(
    framework: Framework, folder: Path, seed: int
) -> tuple[dict[str, float], list[float], list[str]]:
    """Figures, mean rewards of the steps, and what should be otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    name, start = framework.case.name, time.monotonic()
    print(f"{name}: suite", file=sys.stderr, flush=True)
    suite = _suite(f"({name} or test_{name}) and not ({_CONTROLS})", folder, name)
    figures = {f"suite_{what}": number for what, number in suite.items()}
    problems = [f"suite_{what} is {suite[what]:g}" for what in ("failed", "skipped") if suite[what]]
    problems += [] if suite["passed"] else ["no test ran"]
    print(f"{name}: training", file=sys.stderr, flush=True)
    try:
        run = train(framework, folder, seed)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return figures, [], [*problems, "training failed"]
    figures |= run.figures
    figures["seconds"] = round(time.monotonic() - start, 1)
    if figures["optimizer_steps"] != STEPS:
        problems.append(f"{figures['optimizer_steps']:g} optimizer steps")
    if figures["failures"]:
        problems.append(f"{figures['failures']:g} episodes failed")
    return figures, run.rewards, problems


def _suite(selected: str, folder: Path, name: str = "") -> dict[str, float]:
    """Tests that passed, failed and were skipped, of those that `selected` names."""
    result = folder / "suite.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--show-capture=no"]
    subprocess.run(
        [*command, "-k", selected, f"--junitxml={result}", *_SUITES], cwd=ROOT, stdout=sys.stderr
    )
    counts = {"passed": 0.0, "failed": 0.0, "skipped": 0.0}
    for case in ElementTree.parse(result).getroot().iter("testcase"):
        if name and not _is_of(case.attrib, name):
            continue
        kinds = {child.tag for child in case}
        failed = bool(kinds & {"failure", "error"})
        counts["failed" if failed else "skipped" if "skipped" in kinds else "passed"] += 1
    return counts


def _is_of(test: Mapping[str, str], name: str) -> bool:
    """Whether a test is one of this adapter: by its parameter, or without one by its module."""
    if "[" in test["name"]:
        return test["name"].endswith(f"[{name}]")
    return test["classname"].endswith(f".test_{name}")


def _versions(framework: Framework) -> dict[str, str]:
    """Of the packages in its venv."""
    if not framework.packages:
        return {}
    code = "import importlib.metadata as m, json, sys; "
    code += "print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
    command = [str(framework.case.python), "-c", code, *framework.packages]
    found: dict[str, str] = json.loads(subprocess.check_output(command, cwd="/"))
    return found


if __name__ == "__main__":
    main()
