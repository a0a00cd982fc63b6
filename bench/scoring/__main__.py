"""`make bench-scoring`: from a sample's end to its columns, scored per sample and per group.

Real are Redis, trajectory manager, scoring processes and frozen models (1 million parameters, on
the CPU); generation is emulated. Both sides get the same batches, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path
from statistics import fmean

from rich.console import Console

from bench.harness.processes import redis_server, redis_url, scratch
from bench.report import Report, percentile, ratios
from bench.scoring.generation import Batch, create_run, generate
from bench.scoring.sides import COLUMNS, SIDES, Side, Work, make_models, side
from services.chassis import log
from services.chassis.config.settings import ServerConfig

_SECONDS = 300.0
_console = Console(stderr=True)


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, metavar="5+", help="batches of each side")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    log.configure(ServerConfig(log_level="error"), "bench")
    seeds = list(range(given.seed, given.seed + given.rounds))
    raw = asyncio.run(_measure(seeds))
    Report(bench="scoring", figures=_figures(raw), raw=raw, seeds=seeds).publish()


async def _measure(seeds: Sequence[int]) -> dict[str, list[float]]:
    raw: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(scratch()))
        make_models(folder / "models")
        sides = {}
        for name in SIDES:
            redis = stack.enter_context(redis_server(folder / f"redis-{name}", "everysec"))
            opened = side(name, redis_url(redis), folder / name, folder / "models")
            sides[name] = await stack.enter_async_context(opened)
            await create_run(sides[name].store, tuple(COLUMNS), len(seeds) + 1)
        for seed in (-1, *seeds):  # the first is not counted: models warm up
            for name in SIDES:
                _console.print(f"batch {seed}, {name}")
                found = await _round(sides[name], abs(seed) + 10_000 * (seed < 0))
                for figure, values in found.items() if seed >= 0 else ():
                    raw.setdefault(f"{name}.{figure}", []).extend(values)
    return raw


async def _round(given: Side, seed: int) -> dict[str, list[float]]:
    """What one batch showed, by figure."""
    given.columns.work.clear()
    batch = await generate(given.store, seed)
    async with asyncio.timeout(_SECONDS):
        while len(_written(given.columns.work)) < len(batch.ends):
            await asyncio.sleep(0.01)
    return _found(batch, given.columns.work)


def _written(work: Sequence[Work]) -> dict[str, float]:
    """By sample with all columns, when the last one was written."""
    times = [(name, each.column, each.end) for each in work for name in each.sample_ids]
    by_sample = {
        name: {column: end for _, column, end in rows}
        for name, rows in groupby(sorted(times), key=lambda row: row[0])
    }
    return {
        name: max(columns.values())
        for name, columns in by_sample.items()
        if len(columns) == len(COLUMNS)
    }


def _found(batch: Batch, work: Sequence[Work]) -> dict[str, list[float]]:
    written, end = _written(work), max(batch.ends.values())
    busy = sum(each.end - each.begin for each in work)
    hidden = sum(max(min(each.end, end) - each.begin, 0.0) for each in work)
    last = max(written.values())
    return {
        "end_to_columns_seconds": [written[name] - batch.ends[name] for name in batch.ends],
        "hidden_share": [hidden / busy],
        "after_generation_seconds": [last - end],
        "batch_seconds": [last - batch.begin],
        "scoring_seconds": [busy / len(COLUMNS)],
        "generation_seconds": [end - batch.begin],
        "leases": [float(len(work))],
    }


def _figures(raw: dict[str, list[float]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in SIDES:
        waits = raw[f"{name}.end_to_columns_seconds"]
        figures[f"{name}.end_to_columns_p50_seconds"] = percentile(waits, 0.5)
        figures[f"{name}.end_to_columns_p99_seconds"] = percentile(waits, 0.99)
        for figure in ("hidden_share", "after_generation_seconds", "batch_seconds"):
            figures[f"{name}.{figure}"] = fmean(raw[f"{name}.{figure}"])
        for figure in ("scoring_seconds", "generation_seconds", "leases"):
            figures[f"{name}.{figure}"] = fmean(raw[f"{name}.{figure}"])
    ours, theirs = (raw[f"{name}.batch_seconds"] for name in SIDES)
    return {**figures, **ratios("batch_seconds_vs_per_group", ours, theirs)}


if __name__ == "__main__":
    main()
