"""The measurements of growth and of back-pressure: what they fill, and what they would find."""

from __future__ import annotations

import numpy as np

from bench.baselines.store.workload import Options, make_trajectories
from bench.trajectory_manager.growth import LEASED_SAMPLES, bytes_per_token, filled, recut
from bench.trajectory_manager.producers import Seen
from tests.chaos.store.backpressure import RUN_ID, tokens_lost


async def test_a_filled_store_is_one_that_goes_on() -> None:
    """Its open rollouts grow through gRPC, its groups are leased, and what was acked is there."""
    async with filled(size=8, seed=1) as store:
        await store.open_rollouts(8, lambda _: None)
        assert len(store.live) == len({turn.rollout_id for turn in store.live}) == 8
        latencies = await store.append_for(0.05)
        assert len(latencies) == 20
        await store.record_groups(LEASED_SAMPLES)
        assert await store.lease() > 0
        counts = await store.store.runs.run_counts(RUN_ID)
        assert counts.num_ready_groups == LEASED_SAMPLES
        assert counts.num_running_rollouts == 8


async def test_a_lost_token_is_counted() -> None:
    """Negative control: what no store ever got is lost, what it got is not."""
    async with filled(size=8, seed=1) as store:
        await store.open_rollouts(1, lambda _: None)
        seen = Seen()
        seen.acknowledge("never-stored", np.arange(3, dtype=np.int32))
        assert await tokens_lost(store.channel, seen) == 3
        seen.acknowledge(store.live[0].rollout_id, np.full(2, -1, np.int32))
        assert await tokens_lost(store.channel, seen) == 5


async def test_memory_of_a_token_is_counted_on_both_sides() -> None:
    """More than its 8 bytes, and less than a text would need."""
    (work,) = make_trajectories(Options(seed=0, trajectories=1, writers=1, batch=1))
    short = recut(work, 8)
    assert max(segment.token_ids.size for segment in short.segments) == 8
    whole, cut = (np.concatenate([s.token_ids for s in one.segments]) for one in (work, short))
    assert np.array_equal(whole, cut)
    assert await bytes_per_token([work]) > 8
