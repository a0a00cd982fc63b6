"""Emulated rollouts begin as the serving nodes have room, and those under way are never stopped."""

from __future__ import annotations

import asyncio

from bench.sim.emulation.agent import Room
from bench.sim.emulation.emulated_comparison import emulation
from tests.lib.bench_sim.support import AGENTIC, setting


async def test_room_grows_and_shrinks_with_the_nodes() -> None:
    """Two of three begin; a smaller room lets none begin until so many have ended."""
    room, ends = Room(), [asyncio.Event() for _ in range(3)]
    begun: list[int] = []

    async def rollout(number: int) -> None:
        async with room.taken():
            begun.append(number)
            await ends[number].wait()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(rollout(number)) for number in range(3)]
        await room.resize(2)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert begun == [0, 1]
        await room.resize(1)
        ends[0].set()
        await tasks[0]
        await asyncio.sleep(0)
        assert begun == [0, 1]
        ends[1].set()
        await tasks[1]
        ends[2].set()
    assert begun == [0, 1, 2]


def test_emulated_time_passes_as_fast_as_the_control_plane_bears() -> None:
    """Half as fast for twice as many rollouts; slower for many turns; never too fast."""
    many, agents = setting("multiplexed"), setting("multiplexed", AGENTIC)
    fast, slow = (emulation(many, rate).speed for rate in (5.0, 10.0))
    assert fast == 2 * slow
    assert emulation(agents, 10.0).speed < slow
    assert emulation(setting("colocated-sync"), 10.0).speed < slow
    assert emulation(many, 1e-6).speed == 8.0
