"""`make bench-streaming`: steps that start with their first group against steps that wait for all.

StreamRL's start (arXiv 2504.15930) on all of our services: with `stream_groups` the trainer
computes groups as they complete, so that little is left once a step's last sample is there. That
can only show where generation is what takes time: the agent here waits for a tool, a sleep of
lognormal seconds, and then asks the policy for a short answer.

Two clocks measure how long a step continues after its last sample: the trainer's, from the lease of
the sample, and the agents', from the end of the last rollout. The result uses the second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from seamflow.agent import Task
from seamflow.client import Rollout
from seamflow.common.v1.tokens_pb2 import SamplingParams
from seamflow.inspect.run_files import read_steps

from bench.report import RESULTS, Report, ratios
from bench.train.sides import ROOT, Window, read_config, waits, watch
from bench.train.task import score, user_message, write_tasks
from bench.train.trl import as_arguments

CONFIG = "bench/workloads/streaming.toml"
WHOLE, STREAMED = "whole", "streamed"
"""A step begins when all of its groups are complete, or when a few are."""
MIN_ROUNDS = 3
CLAIM = 0.1
"""Largest reported part of a step's time after its last sample."""
ANSWER_TOKENS = 16
"""Of each answer, whatever is sampled: a group costs the trainer the same every time."""
SHORTEST, LONGEST = 0.5, 12.0
"""Seconds of the tool."""
_MEDIAN, _SIGMA = 2.0, 0.8
_NUM_TASKS = 1024
_ARRIVALS = "arrivals.jsonl"
_COLOURS = {WHOLE: "#e58b3a", STREAMED: "#4c9be8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to measure."""

    rounds: int
    """Runs of each side."""
    steps: int
    """Optimizer steps that count, of each run."""
    stream_groups: int
    """Complete groups at which a streamed step starts."""
    max_staleness: int
    """Versions a sample may be behind: steps that are generated while one is trained."""
    seed: int
    """Of weights, tasks and tools; each round has its own."""

    @property
    def window(self) -> Window:
        """What is measured of a run; samples of the steps before may lie ready at its start."""
        return Window(warm_up=self.max_staleness + 1, steps=self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one side."""

    figures: Mapping[str, float]
    """By name."""
    shares: Sequence[float]
    """Of each step that counts: how much of its time lies after the end of its last rollout."""


def main() -> None:
    """Measure, print, report, draw."""
    options = _options()
    runs = measure(options)
    found = figures(runs)
    _print(found)
    named = {name: float(getattr(options, name)) for name in Options.__dataclass_fields__}
    seeds = [options.seed + turn for turn in range(options.rounds)]
    Report(bench="streaming", figures=found | named, raw=_raw(runs), seeds=seeds).publish()
    _draw(RESULTS / "streaming.png", runs)


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--steps", type=int, default=8, help="that count, of a run")
    parser.add_argument("--stream-groups", type=int, default=1, help="that a step begins with")
    parser.add_argument("--max-staleness", type=int, default=1, help="in versions")
    parser.add_argument("--seed", type=int, default=0)
    options = Options(**vars(parser.parse_args()))
    least = {"rounds": MIN_ROUNDS, "steps": 1, "stream_groups": 1, "max_staleness": 1}
    for name, value in least.items():
        if getattr(options, name) < value:
            parser.error(f"--{name.replace('_', '-')}: give at least {value}")
    return options


def measure(options: Options) -> dict[str, list[Run]]:
    """Run both sides in turn; returns the runs by side, one of each round."""
    runs: dict[str, list[Run]] = {WHOLE: [], STREAMED: []}
    # The second of a pair begins on a warmer machine: neither side is always second.
    turns = [(n, side) for n in range(options.rounds) for side in sorted(runs, reverse=n % 2 == 0)]
    with tempfile.TemporaryDirectory(prefix="seamflow-bench-streaming-") as base:
        bench = _Bench(Path(base), options)
        for turn, side in track(turns, "runs", console=Console(stderr=True)):
            runs[side].append(bench.run(side, turn))
    return runs


def figures(runs: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Step times of neighbouring runs, whole over streamed, and the medians of everything.

    Raises `ValueError` for fewer than `MIN_ROUNDS` runs of a side.
    """
    raw = _raw(runs)
    whole, streamed = (raw[f"{side}.seconds_per_step"] for side in (WHOLE, STREAMED))
    found = ratios("streaming_speedup", whole, streamed, least=MIN_ROUNDS)
    return found | {name: median(samples) for name, samples in raw.items()}


def _raw(runs: Mapping[str, Sequence[Run]]) -> dict[str, list[float]]:
    """Samples by "<side>.<figure>", in the order of the rounds."""
    return {
        f"{side}.{name}": [run.figures[name] for run in of_side]
        for side, of_side in runs.items()
        for name in of_side[0].figures
    }


def read_run(
    lines: Sequence[Mapping[str, Any]], arrivals: Mapping[str, float], window: Window
) -> Run:
    """The measured steps, from a run's metrics and its agents.

    Args:
        lines: metrics, one for each step.
        arrivals: by rollout, when it ended, in seconds since 1970.
        window: what counts.

    Raises:
        KeyError: a step is missing, or a rollout that it was trained on.
    """
    by_step = {line["step"]: line for line in lines}
    before, *counted = [by_step[n] for n in range(window.warm_up, window.last + 1)]
    times = [line["time"] for line in (before, *counted)]
    seconds = [end - begin for begin, end in pairwise(times)]
    late = [_after_arrival(line, arrivals) for line in counted]
    whole = sum(seconds)
    found = {
        "after_arrival_share": sum(late) / whole,
        **waits(lines, window),
        "training_share": sum(line["seconds"]["train"] for line in counted) / whole,
        "steps_per_minute": 60 * len(counted) / whole,
        "rollouts_not_trained": float(_not_trained(lines, arrivals, times[-1])),
    }
    return Run(figures=found, shares=[a / b for a, b in zip(late, seconds, strict=True)])


def _after_arrival(line: Mapping[str, Any], arrivals: Mapping[str, float]) -> float:
    """Seconds from the end of a step's last rollout to the end of its optimizer step."""
    phases = line["seconds"]
    # These follow the optimizer, and then the line is written.
    optimized: float = line["time"] - phases.get("checkpoint", 0.0) - phases.get("publish", 0.0)
    return optimized - max(arrivals[_rollout(sample)] for sample in line["sample_ids"])


def _not_trained(
    lines: Sequence[Mapping[str, Any]], arrivals: Mapping[str, float], end: float
) -> int:
    """Rollouts that ended before `end` and are in no step: too old, or they lay ready."""
    trained = {_rollout(sample) for line in lines for sample in line["sample_ids"]}
    return sum(ended < end and rollout not in trained for rollout, ended in arrivals.items())


def _rollout(sample_id: str) -> str:
    return sample_id.rpartition("#")[0]


def tool_seconds(terms: Sequence[int], rollout_id: str) -> float:
    """What the tool takes; the terms are other ones with another seed."""
    random, seconds = Random(f"{terms} {rollout_id}"), 0.0
    # Drawn again instead of cut off, or many would end at the same moment.
    while not SHORTEST <= seconds <= LONGEST:
        seconds = random.lognormvariate(math.log(_MEDIAN), _SIGMA)
    return seconds


def part_tokens(group_size: int) -> int:
    """Budget with which each group is a part of its step and computed in one pass.

    A part ends with the group that brings it to the budget: a group has an answer and at least 7
    tokens of prompt for each rollout. Computed is the prompt once, of at most 9, and all answers.
    """
    return group_size * (ANSWER_TOKENS + 3)


class ToolAgent:
    """Waits for its tool, then asks once, and writes down when it ended."""

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float]:
        """Answer `task`; returns {"reward": 0..1, "success": 0 or 1}."""
        await asyncio.sleep(tool_seconds(task.payload["terms"], rollout.rollout_id))
        turn = await rollout.generate(
            messages=[{"role": "user", "content": user_message(task.payload)}],
            sampling=SamplingParams(max_new_tokens=task.payload["max_new_tokens"], ignore_eos=True),
        )
        _write_arrival(rollout.rollout_id)
        reward, success = score(task.payload, turn.text)
        return {"reward": reward, "success": float(success)}


def _write_arrival(rollout_id: str) -> None:
    line = json.dumps({"rollout_id": rollout_id, "time": time.time()})
    with _beside_token_log(_ARRIVALS).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _read_arrivals(run: Path) -> dict[str, float]:
    lines = (run / _ARRIVALS).read_text(encoding="utf-8").splitlines()
    return {entry["rollout_id"]: entry["time"] for entry in map(json.loads, lines)}


def _beside_token_log(name: str) -> Path:
    """A file in the run's folder: the launcher tells the runner where its log of tokens is."""
    return Path(os.environ["SEAMFLOW_AGENT_RUNNER_TOKEN_LOG"]).with_name(name)


class _Bench:
    """The files of a measurement, and how each side is started on them."""

    def __init__(self, base: Path, options: Options) -> None:
        from bench.train.model import save_model  # the agents' process has no use for torch

        self._base, self._options = base, options
        self._rules = read_config(CONFIG)["launcher"]
        self._model = save_model(base / "model", options.seed)

    def run(self, side: str, turn: int) -> Run:
        """One run of one side; both sides of a round have the same tasks."""
        name, seed, runs = f"{side}-{turn}", self._options.seed + turn, self._base / "runs"
        tasks = self._base / f"tasks-{seed}.jsonl"
        write_tasks(tasks, count=_NUM_TASKS, max_new_tokens=ANSWER_TOKENS, seed=seed)
        flags = as_arguments(
            config=ROOT / CONFIG,
            name=name,
            runs_folder=runs,
            model=self._model,
            tasks=tasks,
            seed=seed,
        )
        command = [sys.executable, "-m", "services.launcher", *flags]
        # A Redis that runs elsewhere would not be counted: the run starts its own.
        own = {key: value for key, value in os.environ.items() if key != "REDIS_URL"}
        metrics, window = runs / name / "metrics.jsonl", self._options.window
        speed = watch(command, {**own, **self._settings(side)}, metrics, window)
        _require_all_tokens(runs / name)
        found = read_run(read_steps(metrics), _read_arrivals(runs / name), window)
        return Run(figures={**found.figures, **speed.figures()}, shares=found.shares)

    def _settings(self, side: str) -> dict[str, str]:
        staleness, in_all = self._options.max_staleness, str(self._options.window.in_all)
        step_rollouts = self._rules["group_size"] * self._rules["groups_per_step"]
        settings = {
            "SEAMFLOW_LAUNCHER_MAX_STALENESS": str(staleness),
            # All that admission lets in.
            "SEAMFLOW_LAUNCHER_CONCURRENCY": str(step_rollouts * (staleness + 1)),
            "SEAMFLOW_TRAINER_NUM_STEPS": in_all,
            # The only checkpoint is written with the last step, which does not count.
            "SEAMFLOW_TRAINER_CHECKPOINT__EVERY": in_all,
        }
        if side == WHOLE:  # with the trainer's own budget: one pass for all groups is cheapest
            return settings
        return settings | {
            "SEAMFLOW_TRAINER_BATCH__STREAM_GROUPS": str(self._options.stream_groups),
            "SEAMFLOW_TRAINER_BATCH__MICRO_BATCH_TOKENS": str(
                part_tokens(self._rules["group_size"])
            ),
        }


def _require_all_tokens(run: Path) -> None:
    """What was fast must have been right: every token an agent saw is in the store, once."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    wrong = {name: summary[name] for name in ("tokens_lost", "tokens_duplicated")}
    if any(wrong.values()):
        raise RuntimeError(f"run {run.name}: {wrong}")


def _print(found: Mapping[str, float]) -> None:
    low, high = (found[f"streaming_speedup_{end}"] for end in ("lowest", "highest"))
    title = f"A streamed step is {found['streaming_speedup']:.2f} times as fast"
    table = Table("median of runs", WHOLE, STREAMED, title=f"{title} ({low:.2f} to {high:.2f})")
    for key in found:
        side, _, name = key.partition(".")
        if side == WHOLE:
            table.add_row(name, f"{found[key]:,.4g}", f"{found[f'{STREAMED}.{name}']:,.4g}")
    Console().print(table)


def _draw(file: Path, runs: Mapping[str, Sequence[Run]]) -> None:
    """For each step and side a bar: the share of its time after the end of its last rollout."""
    from matplotlib.figure import Figure  # the object interface needs no display

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for place, (side, of_side) in enumerate(runs.items()):
        heights = [median(same) for same in zip(*(run.shares for run in of_side), strict=True)]
        places = [number + 0.4 * place - 0.2 for number in range(1, len(heights) + 1)]
        axes.bar(places, heights, 0.38, color=_COLOURS[side], label=side)
    axes.axhline(CLAIM, color="black", linewidth=0.6, linestyle="--")
    axes.set(
        xlabel="counted optimizer step",
        ylabel="share of its time after its last sample",
        title=f"The end of a step, median of {len(runs[WHOLE])} runs of each",
    )
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
