"""The measurement of stores: one peer for real, and one that fails."""

from __future__ import annotations

import pytest

from bench.baselines.store.workload import make_trajectories
from bench.trajectory_manager.store import APPEND, Driver, run_driver
from tests.unit.bench.test_store import OPTIONS

XADD = APPEND[0].peer


def test_a_peer_runs_for_real() -> None:
    """redis-py against a server of its own, in processes of its own."""
    sample = run_driver(XADD, OPTIONS)
    work = make_trajectories(OPTIONS)
    assert sample["appends"] == sum(len(one.segments) for one in work)
    assert sample["bytes"] == sum(one.num_bytes for one in work)
    assert 0 < sample["p50_ms"] <= sample["p99_ms"]


def test_a_driver_that_fails_is_named_with_its_reason() -> None:
    """A missing side never becomes a figure."""
    missing = Driver(name="redis_xadd", module="redis_xadd", arguments=("--no-such-flag",))
    with pytest.raises(RuntimeError, match=r"(?s)redis_xadd ended with code 2.*--no-such-flag"):
        run_driver(missing, OPTIONS)
