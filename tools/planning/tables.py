"""Plans as tables in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from scheduler.policy.node_split import Split
from tools.planning.role_placement import Placement

if TYPE_CHECKING:
    from rich.table import Table

BEST = "best"
"""Name of the row that is the plan."""

Prices = tuple[float, float]
"""Dollars an hour of a node that generates, and of one that trains."""


def split_table(
    title: str, splits: Sequence[Split], names: Mapping[Split, str], prices: Prices | None = None
) -> Table:
    """A row for each split, with the share of its node-seconds in which nodes are idle.

    The seconds of an iteration are those of the slower stage; its dollars are those of all nodes.
    """
    columns = ("generate", "train", "generation s", "training s", "iteration s", "idle")
    table = _table(title, "", columns if prices is None else (*columns, "dollars"))
    for split in splits:
        name = names.get(split, "")
        cost = () if prices is None else (f"{_dollars(split, prices):.2f}",)
        table.add_row(name, *_cells(split), *cost, style="bold" if name == BEST else None)
    return table


def _dollars(split: Split, prices: Prices) -> float:
    hourly = split.generation_nodes * prices[0] + split.training_nodes * prices[1]
    return hourly * split.seconds / 3600


def placement_table(placement: Placement) -> Table:
    """The number of nodes by tags."""
    table = _table(f"{placement.seconds:.1f} s an iteration", "tags", ("nodes",))
    for tags, count in Counter(placement.tags).items():
        table.add_row(", ".join(tags) or "(free)", str(count))
    return table


def span_table(placement: Placement) -> Table:
    """Start and end of each role."""
    table = _table("one iteration", "role", ("begin s", "end s"))
    for tag, begin, end in placement.spans:
        table.add_row(tag, f"{begin:.1f}", f"{end:.1f}")
    return table


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _cells(split: Split) -> tuple[str, ...]:
    counts = (split.generation_nodes, split.training_nodes)
    seconds = (split.generation_seconds, split.training_seconds)
    busy = sum(count * time for count, time in zip(counts, seconds, strict=True))
    idle = 1 - busy / (sum(counts) * split.seconds)
    return *map(str, counts), *(f"{time:.1f}" for time in (*seconds, split.seconds)), f"{idle:.0%}"
