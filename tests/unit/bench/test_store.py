"""The measurement of stores: its workload and its order."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from bench.baselines.environments import interpreter
from bench.baselines.store.workload import (
    Options,
    Reads,
    Result,
    Writes,
    make_trajectories,
    write_segments,
)
from bench.trajectory_manager.store import Driver, Pair, compare, measure_peers

OPTIONS = Options(seed=3, trajectories=4, writers=2, batch=2)


def test_the_workload_is_what_the_figures_say() -> None:
    """2k to 8k tokens in 10 to 50 segments, about 1.6 kB an append, whole at 12 bytes a token."""
    work = make_trajectories(Options(seed=0, trajectories=200, writers=64, batch=256))
    tokens = [sum(part.token_ids.size for part in one.segments) for one in work]
    assert min(tokens) >= 2048
    assert max(tokens) <= 8192
    assert {10, 50} <= {len(one.segments) for one in work}
    assert 1300 < sum(one.num_bytes for one in work) / sum(len(o.segments) for o in work) < 1800
    assert 12 * tokens[0] == work[0].num_bytes == sum(len(p.pack()) for p in work[0].segments)


def test_a_seed_decides_the_workload() -> None:
    """Both sides of a comparison make their own, and get the same."""
    first, again = make_trajectories(OPTIONS), make_trajectories(OPTIONS)
    other = make_trajectories(Options(seed=4, trajectories=4, writers=2, batch=2))
    packed = [[part.pack() for part in one.segments] for one in first]
    assert packed == [[part.pack() for part in one.segments] for one in again]
    assert packed != [[part.pack() for part in one.segments] for one in other]


async def test_every_segment_is_appended_once_and_in_order() -> None:
    """Writers share the trajectories and keep the order within each."""
    work = make_trajectories(OPTIONS)
    seen: dict[int, list[int]] = {}

    async def append(trajectory: object, index: int) -> None:
        seen.setdefault(id(trajectory), []).append(index)

    writes = await write_segments(work, 2, append)
    assert seen == {id(one): list(range(len(one.segments))) for one in work}
    assert len(writes.latencies) == sum(len(one.segments) for one in work)


def test_rates_are_over_the_times_they_name() -> None:
    """Appends until the last acknowledgement, trajectories until the readers had everything."""
    result = Result.of("x", make_trajectories(OPTIONS), *_both_sides(lost=0))
    assert result.appends_per_second == 50
    assert result.trajectories_per_second == 1
    assert (result.p50_ms, result.p99_ms) == (20, 20)


def test_a_store_that_loses_a_byte_has_no_result() -> None:
    """Speed of what was not kept is not reported."""
    with pytest.raises(RuntimeError, match="x: wrote"):
        Result.of("x", make_trajectories(OPTIONS), *_both_sides(lost=1))


def test_both_sides_run_in_turns_on_the_same_workload() -> None:
    """Ours, theirs, for each seed; the figure is the median of neighbours' ratios."""
    ours, peer = Driver(name="ours", module="ours"), Driver(name="theirs", module="theirs")
    pair = Pair(ours=ours, peer=peer, figures={"speed": "appends_per_second"})
    order: list[tuple[str, int]] = []

    def run(driver: Driver, seed: int) -> Mapping[str, float]:
        order.append((driver.name, seed))
        speed = 3.0 if driver is ours else 1.0
        return _sample(speed * (seed + 1))

    section = compare([pair], range(5), run)
    assert order == [(name, seed) for seed in range(5) for name in ("ours", "theirs")]
    assert section.figures["speed"] == 3
    assert section.figures["theirs_appends_per_second"] == 3
    assert section.raw["speed.ours"] == [3, 6, 9, 12, 15]
    assert section.raw["speed.theirs"] == [1, 2, 3, 4, 5]
    alone = measure_peers([pair], [0], run)
    assert "ours_p99_ms" not in alone.figures
    assert alone.figures["theirs_p99_ms"] == 1


def test_a_peer_without_requirements_runs_in_our_environment() -> None:
    """Only what does not fit beside ours is installed apart."""
    assert interpreter("redis_xadd") == Path(sys.executable)


def _both_sides(lost: int) -> tuple[Writes, Reads]:
    """100 appends of 20 ms in 2 s, all of the workload read after 4 s but for `lost` bytes."""
    num_bytes = sum(one.num_bytes for one in make_trajectories(OPTIONS))
    writes = Writes(started=10.0, ended=12.0, latencies=np.full(100, 0.02).tolist())
    return writes, Reads(ended=14.0, trajectories=4, bytes=num_bytes - lost)


def _sample(speed: float) -> Mapping[str, float]:
    measures = ("trajectories_per_second", "p50_ms", "p99_ms")
    return {"appends_per_second": speed, **dict.fromkeys(measures, 1.0)}
