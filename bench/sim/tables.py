"""The comparison in numbers: a table for each workload, and the figures of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from bench.sim.comparison import Row
from bench.sim.simulator.cluster import NodeSeconds

Rows = Mapping[str, Row]
"""Mode -> what came of it."""


def figures(workloads: Mapping[str, Rows]) -> dict[str, float]:
    """Those of the comparison; the worst workload counts."""
    multiplexed = {name: rows["multiplexed"] for name, rows in workloads.items()}
    single = [rows for name, rows in workloads.items() if "single" in name]
    agentic = [rows for name, rows in workloads.items() if "agentic" in name]
    found = {
        "multiplexed_idle_share": max(row.idle_share for row in multiplexed.values()),
        "multiplexed_useful_share": min(row.useful_share for row in multiplexed.values()),
        "multiplexed_max_staleness_less_bound": max(
            max(row.result.staleness) - row.setting.bound for row in multiplexed.values()
        ),
        "streamrl_async_vs_colocated_best": max(
            _gain(rows, "streamrl-async") for rows in workloads.values()
        ),
    }
    for name, rows in workloads.items():
        found[f"{name}.multiplexed_vs_streamrl_async"] = _rate(rows, "multiplexed") / _rate(
            rows, "streamrl-async"
        )
    for kind, many in (("single_turn", single), ("agentic", agentic)):
        if many:
            worst = min(_gain(rows, "multiplexed") for rows in many)
            found[f"multiplexed_vs_colocated_{kind}"] = worst
    for name, rows in workloads.items():
        for mode, row in rows.items():
            found[f"{name}.{mode}.rollouts_per_second"] = row.result.rollouts_per_second
            found[f"{name}.{mode}.useful_share"] = row.useful_share
            found[f"{name}.{mode}.idle_share"] = row.idle_share
            found[f"{name}.{mode}.most_steps_behind"] = max(row.result.lag)
    return found


def print_rows(title: str, rows: Rows) -> None:
    """A line for each mode.

    Staleness is in published versions; steps behind, in optimizer steps, is more where a publish
    was put off.
    """
    bins = [field.name for field in fields(NodeSeconds)]
    columns = ["mode", "rollout", "train", "both", "rollouts/s", "vs colocated"]
    columns += [f"{name.replace('_', ' ')} %" for name in bins] + ["staleness", "steps behind"]
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right" if column != "mode" else "left")
    for mode, row in rows.items():
        split, seconds = row.setting.split, row.result.node_seconds
        table.add_row(
            mode,
            *(str(number) for number in (split.rollout, split.train, split.both)),
            f"{row.result.rollouts_per_second:.2f}",
            f"{_gain(rows, mode):.2f}",
            *(f"{100 * getattr(seconds, name) / seconds.total:.1f}" for name in bins),
            _histogram(row.result.staleness),
            _histogram(row.result.lag),
        )
    Console(width=180).print(table)


def _gain(rows: Rows, mode: str) -> float:
    return _rate(rows, mode) / _rate(rows, "colocated-sync")


def _rate(rows: Rows, mode: str) -> float:
    return rows[mode].result.rollouts_per_second


def _histogram(numbers: Sequence[int]) -> str:
    counts = Counter(numbers)
    return " ".join(
        f"{number}:{100 * counts[number] / len(numbers):.0f}%" for number in sorted(counts)
    )
