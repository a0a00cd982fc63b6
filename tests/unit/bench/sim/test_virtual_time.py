"""The event loop whose clock jumps."""

from __future__ import annotations

import asyncio
import functools

import pytest

from bench.sim.simulator import virtual_time
from bench.sim.simulator.virtual_time import Clock


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


def test_calls_of_the_same_time_are_made_in_the_order_of_asking() -> None:
    """Whenever that was; one that was cancelled is not made."""
    made: list[str] = []

    async def main() -> None:
        clock = Clock()
        calls = {name: clock.call_at(5.0, functools.partial(made.append, name)) for name in "abcd"}
        await clock.sleep(4.0)
        clock.call_at(5.0, lambda: made.append("e"))
        calls["b"].cancel()
        await clock.sleep(2.0)

    virtual_time.run(main())
    assert made == ["a", "c", "d", "e"]


def test_cancelled_tasks_end_with_the_run() -> None:
    """They may still tidy up, and none of them is left behind."""
    ended: list[str] = []

    async def sleeper() -> None:
        try:
            await Clock().sleep(1.0)
        finally:
            ended.append("tidied up")

    async def main() -> None:
        task = asyncio.create_task(sleeper())
        await asyncio.sleep(0)
        task.cancel()

    virtual_time.run(main())
    assert ended == ["tidied up"]


def test_a_deadlock_is_an_error() -> None:
    """Nobody will ever set the event."""

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing will ever happen"):
        virtual_time.run(main())
