"""What the user's code raises ends its call; what cancels a call passes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine

import pytest
from seamflow.user_code.user_calls import Exited, awaited


async def _exit() -> None:
    await asyncio.sleep(0)
    sys.exit(3)


async def _exit_in_a_task() -> None:
    await asyncio.gather(_exit(), asyncio.sleep(0))


@pytest.mark.parametrize("work", [_exit, _exit_in_a_task])
async def test_an_exit_is_an_error_of_its_call(
    work: Callable[[], Coroutine[None, None, None]],
) -> None:
    with pytest.raises(Exited, match=r"SystemExit\(3\)"):
        await awaited(work())


def test_without_it_the_loop_ends() -> None:
    """The control: with it goes everybody's work."""
    made: list[asyncio.Task[None]] = []

    async def served() -> None:
        made.append(asyncio.create_task(_exit()))
        await asyncio.sleep(60)

    with pytest.raises(SystemExit):
        asyncio.run(served())
    assert isinstance(made[0].exception(), SystemExit)


async def test_a_cancelled_call_is_cancelled() -> None:
    """And so is one that takes too long."""
    calling = asyncio.create_task(awaited(asyncio.sleep(60)))
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await awaited(asyncio.sleep(60))


async def test_a_cancellation_that_nobody_asked_for_is_an_error() -> None:
    """Such as one that leaks from a library."""

    async def leaks() -> None:
        raise asyncio.CancelledError

    with pytest.raises(Exited, match="CancelledError"):
        await awaited(leaks())
