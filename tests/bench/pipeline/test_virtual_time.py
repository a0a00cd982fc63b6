"""The event loop whose clock jumps."""

from __future__ import annotations

import asyncio

import pytest

from bench.pipeline import virtual_time
from bench.pipeline.clock import Clock


def test_sleepers_wake_in_order_at_their_time() -> None:
    """However long they sleep: no real time passes, or this would take weeks."""
    woken: list[tuple[str, float]] = []

    async def sleeper(clock: Clock, name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.now()))

    async def main() -> None:
        clock = Clock()
        await asyncio.gather(
            sleeper(clock, "last", 4e6), sleeper(clock, "first", 0.5), sleeper(clock, "second", 1e6)
        )

    virtual_time.run(main())
    assert woken == [("first", 0.5), ("second", 1e6), ("last", 4e6)]


def test_a_faster_clock_tells_its_own_seconds() -> None:
    """Emulated seconds are those that callers see."""

    async def main() -> list[float]:
        clock, times = Clock(speed=10.0), list[float]()
        clock.call_at(30.0, lambda: times.append(clock.now()))
        await clock.sleep(50.0)
        return [*times, clock.now(), asyncio.get_running_loop().time()]

    assert virtual_time.run(main()) == pytest.approx([30.0, 50.0, 5.0])


def test_a_deadlock_is_an_error() -> None:
    """Nobody will ever set the event."""

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing will ever happen"):
        virtual_time.run(main())
