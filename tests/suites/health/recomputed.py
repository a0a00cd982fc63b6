"""Figures that a run of several lives shows, and the same figures computed again from what it left:
metrics.jsonl, lives.jsonl and its store."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.durations import seconds_of
from seamflow.inspect.clients import RunClients
from seamflow.inspect.run_folders import ended_status, run_folders
from seamflow.inspect.snapshot import Snapshot
from seamflow.pages import pages
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.console.sources.private_store import private_store
from services.console.sources.shown_runs import folder_run
from services.console.views.overview import run_row, step_curves

_CANCELLED = tokens_pb2.FAILURE_CLASS_CANCELLED
_MANY = 3
_STATUS = ("status.step", "status.reward_first", "status.reward_last", "status.last_step")
Figures = Mapping[str, float]


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The objects of a file, whose last line may be cut."""
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


async def stored_rollouts(folder: Path) -> list[trajectory_pb2.Trajectory]:
    """All that an ended run has stored, with their turns."""
    async with private_store(folder, folder.name) as endpoints:
        stub = RunClients(endpoints).trajectories
        request = pb.ListTrajectoriesRequest(run_id=folder.name, page_size=250)
        listed = pages(lambda page: stub.ListTrajectories(page), request)
        return [each async for page in listed for each in page.trajectories]


def shown(folder: Path) -> dict[str, float]:
    """The figures of summary, `seamflow status`, `seamflow runs` and the console."""
    summary = json.loads((folder / "summary.json").read_text())
    names = (
        *("lives", "reward_first", "reward_last", "trained_tokens_per_second", "optimizer_steps"),
        *("weight_updates", "rollouts", "turns", "tokens_recorded", "failed_rollouts"),
        *("cancelled_rollouts", "infrastructure_failures", "max_staleness_seen"),
        *("process_restarts", "seconds_learning", "seconds_total"),
    )
    found = {f"summary.{name}": float(summary[name]) for name in names}
    status = ended_status(folder, "ended")
    ends = re.search(r"step (\d+); mean reward (\S+) \(step 1\) → (\S+) \(step (\d+)\)", status)
    assert ends, status
    found |= {name: float(end) for name, end in zip(_STATUS, ends.groups(), strict=True)}
    found["status.lives"] = len(re.findall(r"\d+: from .* UTC, ", status))
    (row,) = (each for each in run_folders(folder.parent) if each["run"] == folder.name)
    found["runs.steps"], found["runs.lives"] = float(row["steps"]), float(row["lives"])
    found["runs.reward"] = float(row["reward"])
    run = folder_run(folder)
    run.steps.read()
    of_console = run_row(run, Snapshot())
    found["console.step"], found["console.reward"] = of_console["step"], of_console["reward"]
    found["console.seconds"] = of_console["seconds"]
    curves = step_curves(run, Snapshot(), ["reward_mean", "num_tokens"], 0)
    found["console.steps"] = len(curves["steps"])
    found["console.reward_sum"] = sum(curves["metrics"]["reward_mean"])
    found["console.tokens"] = sum(curves["metrics"]["num_tokens"])
    found["console.last_time"] = curves["time"][-1]
    return found


def recomputed(folder: Path, stored: Sequence[trajectory_pb2.Trajectory]) -> dict[str, float]:
    """The same by the same names, without the code that shows them."""
    steps = lines_of(folder / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1)), "a step is repeated"
    lives = list(_lives(lines_of(folder / "lives.jsonl")))
    rewards, tokens = [s["reward_mean"] for s in steps], sum(s["num_tokens"] for s in steps)
    ends = [each.get("stopping", each["ended"]) for each in lives[:-1]]
    # One that is killed in its first moments has not been seen to learn.
    learning = sum(end - each.get("learning", end) for end, each in zip(ends, lives, strict=False))
    learning += lives[-1]["learned"] - lives[-1]["learning"]
    total = sum(each["ended"] - each["started"] for each in lives[:-1])
    drawn = (folder / "timeline.png").stat().st_mtime
    ended = [r for r in stored if r.HasField("failure") and seconds_of(r.finish_time) <= drawn]
    gaps = [
        (before.get("stopping", before["ended"]), after["started"])
        for before, after in pairwise(lives)
    ]
    classes = [
        _CANCELLED
        if any(begin <= seconds_of(r.finish_time) <= end for begin, end in gaps)
        else r.failure.failure_class
        for r in ended
    ]
    spans = [s for r in stored for t in r.turns for s in t.tokens.spans]
    return {
        "summary.lives": len(lives),
        "summary.reward_first": fmean(rewards[:_MANY]),
        "summary.reward_last": fmean(rewards[-_MANY:]),
        "summary.trained_tokens_per_second": tokens / learning,
        "summary.optimizer_steps": len(steps),
        "summary.weight_updates": len({s["weight_version"] for s in steps}),
        "summary.rollouts": sum(r.HasField("rewards") for r in stored),
        "summary.turns": sum(len(r.turns) for r in stored),
        "summary.tokens_recorded": sum(
            s.num_tokens for s in spans if s.origin == tokens_pb2.ORIGIN_POLICY
        ),
        "summary.failed_rollouts": sum(each != _CANCELLED for each in classes),
        "summary.cancelled_rollouts": classes.count(_CANCELLED),
        "summary.infrastructure_failures": classes.count(tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE),
        "summary.max_staleness_seen": max(s["max_staleness"] for s in steps),
        "summary.process_restarts": sum(each["restarts"] for each in lives),
        "summary.seconds_learning": learning,
        "summary.seconds_total": total + drawn - lives[-1]["started"],
        **dict(zip(_STATUS, _ends(steps), strict=True)),
        "status.lives": len(lives),
        "runs.steps": len(steps),
        "runs.lives": len(lives),
        "runs.reward": rewards[-1],
        "console.step": len(steps),
        "console.reward": rewards[-1],
        "console.seconds": total + lives[-1]["ended"] - lives[-1]["started"],
        "console.steps": len(steps),
        "console.reward_sum": sum(rewards),
        "console.tokens": tokens,
        "console.last_time": steps[-1]["time"],
    }


def _ends(steps: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    last = len(steps)
    return last, steps[0]["reward_mean"], steps[-1]["reward_mean"], last


def _lives(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, float]]:
    """When each life began, learned, was asked to stop and ended."""
    life: dict[str, float] = {}
    for line in lines:
        state, time = line["state"], line["time"]
        if state == "started":
            life = {"started": time, "restarts": 0}
        elif state == "restarted":
            life["restarts"] += 1
        elif state in ("learning", "learned", "stopping"):
            life[state] = time
        else:
            yield {**life, "ended": time}


def differing(said: Figures, computed: Figures) -> list[str]:
    """Names of the figures that are not the same: to three digits, and seconds to two of them."""
    missing = sorted(said.keys() ^ computed.keys())
    return missing + [
        f"{name}: {said[name]:g} is shown, {computed[name]:g} is true"
        for name in sorted(said.keys() & computed.keys())
        if abs(said[name] - computed[name]) > _tolerance(name, computed[name])
    ]


def _tolerance(name: str, value: float) -> float:
    if "seconds" in name:
        return 2.0
    if name.endswith("per_second"):
        return 0.03 * value  # seconds of a short run
    return 0.00051 if "reward" in name else 0.0


def all_differing(folder: Path) -> list[str]:
    """What `differing` finds in the folder of a run that has ended."""
    return differing(shown(folder), recomputed(folder, asyncio.run(stored_rollouts(folder))))
