"""`make bench-papers`: each headline of the papers beside its best alternative, in one run.

Every side is a run of `seamflow train` by a file of examples/papers, on the work of `workload.py`.
Sides of a round follow each other, in turn in either order.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from seamflow.inspect.run_files import read_steps

from bench.papers.headlines import HEADLINES, Headline, Side
from bench.papers.workload import make_workload
from bench.report import Report, ratios
from tools.provenance import ROOT

WARM_UP = 6
"""Steps before the first that counts: until then gates and R_t are measured, and what lay ready
when training began is used up."""
_LOOK_SECONDS = 0.2
_console = Console(stderr=True)


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="that count, of each side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=HEADLINES, default=list(HEADLINES))
    given = parser.parse_args()
    seeds = list(range(given.seed, given.seed + given.rounds))
    raw: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="seamflow-bench-papers-") as folder:
        prepared = Path(folder)
        make_workload(prepared, given.seed)
        for name in given.only:
            _console.print(f"{name}. {HEADLINES[name].paper}. Here: {HEADLINES[name].how}.")
        for number, seed in enumerate(seeds):
            for name in given.only:
                for side, found in _round(HEADLINES[name], prepared, seed, given.steps, number):
                    for figure, value in found.items():
                        raw.setdefault(f"{name}.{side}.{figure}", []).append(value)
                    _console.print(f"{name}, {side}, seed {seed}: {found}")
    figures = {key: each for name in given.only for key, each in _figures(name, raw).items()}
    report = Report(bench="papers", figures=figures, raw=raw, seeds=seeds)
    if list(given.only) == list(HEADLINES):
        report.publish()
    else:
        report.show()


def _round(
    headline: Headline, prepared: Path, seed: int, steps: int, number: int
) -> Sequence[tuple[str, dict[str, float]]]:
    """The figures of each side; the second begins on a warmer machine, so orders alternate."""
    order = list(headline.sides.items())
    return [
        (name, _measured(headline, side, prepared, seed, steps))
        for name, side in (order if number % 2 == 0 else order[::-1])
    ]


def _measured(
    headline: Headline, side: Side, prepared: Path, seed: int, steps: int
) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="seamflow-bench-papers-run-") as folder:
        run = _trained(side, prepared, seed, WARM_UP + steps, Path(folder))
        lines = read_steps(run / "metrics.jsonl")[WARM_UP - 1 :]
        summary = json.loads((run / "summary.json").read_text())
    counted = lines[1:]
    return {
        "rate": headline.rate(lines),
        "train_share": sum(each["seconds"]["train"] for each in counted)
        / (counted[-1]["time"] - lines[0]["time"]),
        "idle_share": _idle_share(summary),
        "tokens_lost": summary["tokens_lost"],
    }


def _trained(side: Side, prepared: Path, seed: int, num_steps: int, folder: Path) -> Path:
    """Run the side to its end; the run's folder."""
    flags = {
        "prepare": "",
        "model": prepared / "model",
        "tasks": prepared / "tasks.jsonl",
        "heldout-tasks": "",
        "console": "false",
        "concurrency": 24,
        "runs-folder": folder,
        "name": "run",
        "seed": seed,
    }
    command = [
        *(sys.executable, "-m", "services.launcher"),
        *("--config", f"examples/papers/{side.example}.toml"),
        *(f"--{name}={value}" for name, value in flags.items()),
        # Few turns at once: so decoding takes longer than training, as on a GPU.
        *(f"--set=trainer.num_steps={num_steps}", "--set=rollout_server.max_running=8"),
        *side.flags,
    ]
    log = folder / "terminal.log"
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ}, stdout=output, stderr=output
        )
        try:
            while launcher.poll() is None:
                _pin(folder / "run/logs/processes.json", side.cores)
                time.sleep(_LOOK_SECONDS)
        finally:
            launcher.terminate()
            launcher.wait()
    if launcher.returncode:
        raise RuntimeError(f"{side.example} failed: {log.read_text()[-4000:]}")
    return folder / "run"


def _pin(file: Path, cores: Mapping[str, int]) -> None:
    """Keep the processes of each node on its core; what they start later stays there too."""
    if not cores or not file.exists():
        return
    rows: Mapping[str, Mapping[str, Any]] = json.loads(file.read_text())
    for name, row in rows.items():
        for end, core in cores.items():
            if not name.endswith(end) or name.startswith("node_agent"):
                continue
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                process = psutil.Process(row["pid"])
                for each in (process, *process.children(recursive=True)):
                    for thread in each.threads():  # each has an affinity of its own
                        os.sched_setaffinity(thread.id, {core})


def _idle_share(summary: Mapping[str, Any]) -> float:
    """Of the time of all nodes, during training."""
    nodes = summary["nodes"].values()
    return sum(float(node.get("idle", 0.0)) for node in nodes) / max(len(nodes), 1)


def _figures(name: str, raw: Mapping[str, Sequence[float]]) -> dict[str, float]:
    ours, *others = HEADLINES[name].sides
    found: dict[str, float] = {}
    for other in others:
        mine, theirs = (raw[f"{name}.{side}.rate"] for side in (ours, other))
        found |= ratios(f"{name}.{ours}_over_{other}", mine, theirs, least=1)
    for side in (ours, *others):
        values = raw[f"{name}.{side}.idle_share"]
        found[f"{name}.{side}.idle_share"] = sum(values) / len(values)
    found[f"{name}.tokens_lost"] = sum(
        sum(raw[f"{name}.{side}.tokens_lost"]) for side in (ours, *others)
    )
    return found


if __name__ == "__main__":
    main()
