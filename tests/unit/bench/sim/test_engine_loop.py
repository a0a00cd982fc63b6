"""The engine in virtual time: who waits for a sequence hears how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bench.sim.costs import load_costs
from bench.sim.simulator import virtual_time
from bench.sim.simulator.decoding import Work
from bench.sim.simulator.engine_loop import EngineLoop
from bench.sim.simulator.virtual_time import Clock

COSTS = replace(load_costs().engine, decode_seconds_per_cached_token=0.0)
STEP = COSTS.decode_seconds.seconds(1)


def engine(slots: int = 2) -> EngineLoop:
    """One without anything to do."""
    return EngineLoop(COSTS, slots, Clock())


def test_sequences_end_when_they_are_sampled() -> None:
    """Short before long, each at its last step."""

    async def main() -> list[float]:
        loop, clock = engine(), Clock()
        futures = [loop.submit(Work(n, 0, tokens, 0)) for n, tokens in enumerate((10, 30))]
        times = []
        for future in futures:
            assert await future
            times.append(clock.now())
        return times

    assert virtual_time.run(main()) == pytest.approx([10 * STEP, 30 * STEP])


def test_held_sequences_go_on_in_order() -> None:
    """They take as much longer as they were held; one that came meanwhile waits with them."""

    async def main() -> tuple[float, int]:
        loop, clock = engine(slots=1), Clock()
        first, second = (loop.submit(Work(n, 0, 10, 0)) for n in range(2))
        await clock.sleep(4 * STEP)
        loop.hold()
        third = loop.submit(Work(2, 0, 10, 0))
        assert (loop.num_running, loop.num_queued, loop.holding) == (0, 3, True)
        await clock.sleep(100.0)
        loop.go_on()
        for future in (first, second, third):
            assert not future.done()
            assert await future
        return clock.now(), loop.num_running

    now, running = virtual_time.run(main())
    again = 4 / COSTS.prefill_tokens_per_second
    assert now == pytest.approx(30 * STEP + 100.0 + again)
    assert running == 0


def test_sequences_that_are_given_up_say_how_far_they_came() -> None:
    """Also those without a slot; the engine has nothing left then."""

    async def main() -> None:
        loop, clock = engine(slots=1), Clock()
        works = [Work(n, 0, 10, 0) for n in range(2)]
        futures = [loop.submit(work) for work in works]
        await clock.sleep(4.5 * STEP)
        loop.give_up()
        assert [await future for future in futures] == [False, False]
        assert [work.sampled for work in works] == [4, 0]
        loop.go_on()
        rest = loop.submit(works[0])
        assert await rest
        assert works[0].sampled == 10

    virtual_time.run(main())


def test_an_update_tells_the_time_spent_so_far() -> None:
    """Prefill that is still to come is not in it."""

    async def main() -> None:
        loop, clock = engine(), Clock()
        work = Work(0, 39000, 10, 39000)
        ended = loop.submit(work)
        await clock.sleep(0.5)
        assert loop.update().prefill == pytest.approx(0.5)
        await clock.sleep(0.5 + 4.5 * STEP)
        assert loop.update().decode == pytest.approx(4.5 * STEP)
        assert work.sampled == 4
        assert await asyncio.wait_for(ended, 1.0)

    virtual_time.run(main())
