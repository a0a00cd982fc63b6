"""`make bench-fusion`: plans of fused pipelines on RLHFuse's twelve settings, and their bounds.

Nothing is executed: times are the paper's ticks. `serial_queued` is what an executor runs that
queues the critic behind the actor, `serial` the paper's baseline without any overlap.
"""

from __future__ import annotations

import argparse
import dataclasses

from rich.console import Console
from rich.progress import track

from bench.fusion.settings import SETTINGS, Setting, serial_memory
from bench.report import Report
from trainer.pipeline.fused_schedule.plan import FusedPlan, fused_plan, serial_orders
from trainer.pipeline.fused_schedule.problem import timeline


def main() -> None:
    """Plan all settings, without a capacity and within the paper's memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu-seconds", type=float, default=20.0, help="of each search")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    figures: dict[str, float] = {"plans_at_bound": 0.0, "plans_at_bound_within_memory": 0.0}
    raw: dict[str, list[float]] = {"cpu_seconds": [], "gap_within_memory": []}
    for setting in track(SETTINGS, "planning", console=Console(stderr=True)):
        free = fused_plan(setting.problem(), given.cpu_seconds, given.seed)
        capped = _within_memory(setting, given.cpu_seconds, given.seed)
        figures["plans_at_bound"] += free.seconds == free.bound
        figures["plans_at_bound_within_memory"] += capped.seconds == capped.bound
        figures |= _figures(setting, free, capped)
        raw["cpu_seconds"].append(free.cpu_seconds)
        raw["gap_within_memory"].append(capped.seconds / capped.bound - 1)
    figures["cpu_seconds_most"] = max(raw["cpu_seconds"])
    figures["gap_within_memory_most"] = max(raw["gap_within_memory"])
    Report(bench="fusion", figures=figures, raw=raw, seeds=[given.seed], packages=()).publish()


def _within_memory(setting: Setting, cpu_seconds: float, seed: int) -> FusedPlan:
    problem = setting.problem()
    capacity = setting.paper_memory * serial_memory(problem) + 1e-6
    return fused_plan(dataclasses.replace(problem, capacity=capacity), cpu_seconds, seed)


def _figures(setting: Setting, free: FusedPlan, capped: FusedPlan) -> dict[str, float]:
    problem = setting.problem()
    queued = timeline(problem, serial_orders(problem)).seconds
    name = (
        f"{setting.actor_stages}_{setting.critic_stages}_stages_{setting.micro_batches}"
        "_micro_batches"
    )
    return {
        f"{name}.plan": free.seconds,
        f"{name}.bound": free.bound,
        f"{name}.paper": setting.paper,
        f"{name}.plan_within_memory": capped.seconds,
        f"{name}.serial_queued_vs_plan": queued / free.seconds,
        f"{name}.serial_vs_plan": setting.serial / free.seconds,
    }


if __name__ == "__main__":
    main()
