"""`make bench-fusion`, its second part: plans carried out on four gloo ranks.

The ranks run the trainer's interpreter with stages that sleep. The actor waits for the critic's
values, and the baseline is one model after the other in the same interpreter. `gradients` are the
greatest differences from whole models, on the same ranks; stages are uneven, micro-batches ragged.
"""

from __future__ import annotations

import argparse

from bench.fusion.execution import CASES, Executed, execute
from bench.fusion.gradients import GradientCase
from bench.report import Report

_ACTOR, _CRITIC, _REPLICA, _MICRO_BATCHES = (2, 1, 3, 1), (1, 2, 1, 1), (2, 1), 9
"""Blocks of the stages whose gradients are compared."""


def main() -> None:
    """Carry out all cases and compare gradients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tick-seconds", type=float, default=0.03, help="unit of the cases' times")
    parser.add_argument("--repeats", type=int, default=5, help="of each plan")
    given = parser.parse_args()
    gradients = [
        GradientCase.planned(_ACTOR, critic, _MICRO_BATCHES) for critic in (_CRITIC, _REPLICA)
    ]
    executed, differences = execute(CASES, given.tick_seconds, given.repeats, gradients)
    figures: dict[str, float] = {}
    raw: dict[str, list[float]] = {}
    for each in executed:
        figures |= _figures(each)
        raw |= {f"{each.name}.fused": each.fused, f"{each.name}.serial": each.serial}
    figures["gradients_without_replicas"], figures["gradients_with_replicas"] = differences
    Report(bench="executed_plans", figures=figures, raw=raw, packages=("torch",)).publish()


def _figures(case: Executed) -> dict[str, float]:
    # The fastest: whatever else the machine does only adds.
    fused, serial = min(case.fused), min(case.serial)
    return {
        f"{case.name}.fused_vs_planned": fused / case.fused_planned,
        f"{case.name}.serial_vs_planned": serial / case.serial_planned,
        f"{case.name}.serial_vs_fused": serial / fused,
    }


if __name__ == "__main__":
    main()
