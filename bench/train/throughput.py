"""Useful tokens per second of whole training runs: all of our services against TRL in one process.

Both train the same model on the same tasks from the same file, with the same loss, so many rollouts
a step and so many new tokens at most. A run is a fresh start of either side; they take turns. TRL
samples and trains in turn, ours at the same time, on samples of up to two versions before.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from seamflow.inspect.run_files import read_steps

from bench.report import ratios
from bench.train.model import save_model
from bench.train.sides import ROOT, Window, read_config, waits, watch
from bench.train.task import write_tasks
from bench.train.trl import as_arguments, trl_command, trl_environment

WORKLOADS = (64, 256)
"""Most new tokens of a rollout."""
WARM_UP_STEPS = 3
"""Not counted. Samples of max_staleness + 1 steps may lie ready when the trainer has started."""
MIN_ROUNDS = 3
OURS, TRL = "seamflow", "trl"
_CONFIG = "bench/workloads/train.toml"
_NUM_TASKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to measure."""

    with_trl: bool
    """Whether TRL takes its turns."""
    rounds: int
    """Runs of each side on each workload."""
    steps: int
    """Optimizer steps that count, of each run."""
    mode: str
    """The quickstart's mode that gives our nodes their tags."""
    cores: int
    """Torch threads of TRL."""
    seed: int
    """Of weights, tasks and their order."""

    @property
    def window(self) -> Window:
        """What is measured of a run."""
        return Window(warm_up=WARM_UP_STEPS, steps=self.steps)


def measure(options: Options, report: Callable[[str], None]) -> dict[str, list[float]]:
    """Run all rounds.

    Args:
        options: how.
        report: called with the description of a run when it ended.

    Returns:
        Samples by "max<tokens>.<side>.<figure>", one for each round.
    """
    raw: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="seamflow-bench-train-") as base:
        bench = _Bench(Path(base), options)
        for turn in range(options.rounds):
            for most in WORKLOADS:
                for side in _in_turn(options.with_trl, turn):
                    found = bench.run(side, most, turn)
                    for name, value in found.items():
                        raw.setdefault(f"max{most}.{side}.{name}", []).append(value)
                    report(f"{side}, at most {most} tokens")
    return raw


def figures(raw: Mapping[str, Sequence[float]], rounds: int) -> dict[str, float]:
    """Ratios of neighbouring runs, if TRL ran, and the medians of everything."""
    found: dict[str, float] = {}
    for most in WORKLOADS:
        ours, theirs = (raw.get(f"max{most}.{side}.tokens_per_second") for side in (OURS, TRL))
        if ours and theirs:
            found |= ratios(f"e2e_vs_trl_max{most}", ours, theirs, least=MIN_ROUNDS)
    found["runs_of_each"] = float(rounds)
    return found | {name: median(samples) for name, samples in raw.items()}


def threads(table: str) -> int:
    """Torch threads of one of our processes: "trainer" or "rollout_server"."""
    given = os.environ.get(f"SEAMFLOW_{table.upper()}_THREADS")
    return int(given or read_config(_CONFIG).get(table, {}).get("threads", 1))


class _Bench:
    """The files of a measurement, and how each side is started on them."""

    def __init__(self, base: Path, options: Options) -> None:
        self._base, self._options = base, options
        self._model = save_model(base / "model", options.seed)
        self._tasks = {
            most: write_tasks(
                base / f"tasks-{most}.jsonl",
                count=_NUM_TASKS,
                max_new_tokens=most,
                seed=options.seed,
            )
            for most in WORKLOADS
        }

    def run(self, side: str, most: int, turn: int) -> dict[str, float]:
        """One run of one side; its seed is its own."""
        name = f"{side}-max{most}-{turn}"
        run = self._ours if side == OURS else self._trl
        return run(name, most, self._options.seed + turn)

    def _ours(self, name: str, most: int, seed: int) -> dict[str, float]:
        runs, in_all = self._base / "runs", str(self._options.window.in_all)
        flags = as_arguments(
            config=ROOT / _CONFIG,
            name=name,
            runs_folder=runs,
            model=self._model,
            tasks=self._tasks[most],
            seed=seed,
        )
        # TRL saves nothing in a run: one checkpoint, with the last step, which does not count.
        settings = {
            "SEAMFLOW_TRAINER_NUM_STEPS": in_all,
            "SEAMFLOW_TRAINER_CHECKPOINT__EVERY": in_all,
            "SEAMFLOW_LAUNCHER_NODES": ",".join(_nodes(self._options.mode)),
        }
        # A Redis that runs elsewhere would not be counted: the run starts its own.
        own = {key: value for key, value in os.environ.items() if key != "REDIS_URL"}
        command = [sys.executable, "-m", "services.launcher", *flags]
        metrics = runs / name / "metrics.jsonl"
        found = watch(command, {**own, **settings}, metrics, self._options.window)
        _require_all_tokens(runs / name)
        return found.figures() | waits(read_steps(metrics), self._options.window)

    def _trl(self, name: str, most: int, seed: int) -> dict[str, float]:
        metrics, cores = self._base / f"{name}.jsonl", self._options.cores
        rules = read_config(_CONFIG)
        command = trl_command(
            rules,
            task="sums",
            model=self._model,
            tasks=self._tasks[most],
            metrics=metrics,
            max_new_tokens=most,
            steps=self._options.window.in_all,
            learning_rate=rules["trainer"]["learning_rate"],
            schedule="constant",
            threads=cores,
            seed=seed,
        )
        found = watch(command, trl_environment(cores), metrics, self._options.window)
        _require_threads(metrics, cores)
        return found.figures()


def _in_turn(with_trl: bool, turn: int) -> tuple[str, ...]:
    """The second of a pair begins on a warmer machine: neither side is always second."""
    if not with_trl:
        return (OURS,)
    return (OURS, TRL) if turn % 2 == 0 else (TRL, OURS)


def _nodes(mode: str) -> list[str]:
    """Nodes and their tags, as the quickstart has them in this mode."""
    nodes: list[str] = read_config(f"examples/quickstart/{mode}.toml")["launcher"]["nodes"]
    return nodes


def _require_all_tokens(run: Path) -> None:
    """What was fast must have been right: every token an agent saw is in the store, once."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    wrong = {name: summary[name] for name in ("tokens_lost", "tokens_duplicated")}
    if any(wrong.values()):
        raise RuntimeError(f"run {run.name}: {wrong}")


def _require_threads(metrics: Path, threads: int) -> None:
    used = {line["torch_threads"] for line in read_steps(metrics)}
    if used != {threads}:
        raise RuntimeError(f"TRL used {used} torch threads, not {threads}")
