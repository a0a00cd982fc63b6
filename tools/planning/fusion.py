"""`--fuse`: actor and critic trained as pipelines in opposite directions over the same nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.pipeline.fused_schedule.greedy import greedy
from trainer.pipeline.fused_schedule.plan import FusedPlan, fused_plan, serial_orders
from trainer.pipeline.fused_schedule.problem import (
    FORWARD,
    Orders,
    Pipeline,
    Problem,
    serial_seconds,
)
from trainer.pipeline.fused_schedule.reroute import dropped_seconds, replicated, rerouted
from trainer.pipeline.fused_schedule.timeline import timeline

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = 75
_LETTERS = "aA", "bB", "cC", "dD", "eE", "fF", "gG", "hH"
"""Of each model: forward and backward."""


def fusion_table(problem: Problem, plan: FusedPlan) -> Table:
    """A row for each schedule; its gain is over 1F1B of one model queued behind the other, which is
    what an executor would run unfused."""
    from rich.table import Table

    queued = timeline(problem, serial_orders(problem)).seconds
    table = Table(title=f"{len(problem.pipelines)} pipelines on {len(problem.nodes)} nodes")
    for column in ("schedule", "seconds", "gain", "activation bytes"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for name, orders in (("1F1B, queued", serial_orders(problem)), ("greedy", greedy(problem))):
        table.add_row(name, *_cells(problem, orders, queued))
    found = f"found by {plan.found_by}, {plan.cpu_seconds:.1f} CPU s"
    table.add_row(found, *_cells(problem, plan.orders, queued), style="bold")
    table.add_row("least possible", f"{plan.bound:g}", f"{queued / plan.bound:.2f}", "")
    serial = serial_seconds(problem)
    table.add_row("1F1B, one after the other", f"{serial:g}", f"{queued / serial:.2f}", "")
    return table


def _cells(problem: Problem, orders: Orders, queued: float) -> tuple[str, str, str]:
    placed = timeline(problem, orders)
    return f"{placed.seconds:g}", f"{queued / placed.seconds:.2f}", f"{placed.peak_bytes:,.4g}"


def picture(problem: Problem, orders: Orders) -> str:
    """A line for each node: small letters forward, capitals backward, dots idle."""
    placed = timeline(problem, orders)
    columns = min(_COLUMNS, round(placed.seconds))
    rows = [["·"] * columns for _ in problem.nodes]
    for task in placed.tasks:
        first, last = (round(at / placed.seconds * columns) for at in (task.start, task.end))
        letters = _LETTERS[task.pipeline % len(_LETTERS)]
        for column in range(first, max(last, first + 1)):
            if column < columns:
                rows[task.node][column] = letters[0 if task.kind == FORWARD else 1]
    return "\n".join(f"{node:>3} {''.join(row)}" for node, row in enumerate(rows))


def reroute_table(pipeline: Pipeline, replicas: int, cpu_seconds: float, seed: int) -> Table:
    """A row for each stage that may fail: rerouted through its peers, next to a dropped replica."""
    from rich.table import Table

    healthy = replicated(pipeline, replicas).pipelines[0].seconds_alone
    dropped = dropped_seconds(pipeline, replicas)
    table = Table(title=f"{replicas} replicas, all well: {healthy:g} s; one dropped: {dropped:g} s")
    columns = ("failed stage", "rerouted s", "least possible s", "gain over dropping")
    for column in columns:
        table.add_column(column, justify="left" if column == "failed stage" else "right")
    for stage in range(pipeline.num_stages):
        plan = fused_plan(rerouted(pipeline, replicas, stage), cpu_seconds, seed)
        longer = f"{dropped / plan.seconds - 1:.0%}"
        table.add_row(str(stage), f"{plan.seconds:g}", f"{plan.bound:g}", longer)
    return table
