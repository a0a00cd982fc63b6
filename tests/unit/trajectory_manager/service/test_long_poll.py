"""Long polls cost little with any number of callers, and each caller is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from trajectory_manager.model.records import Topic
from trajectory_manager.service.long_poll import LongPoll, Reading
from trajectory_manager.store.redis.run_store import RunStore

MANY = 300


class Tasks(RunStore):
    """A store of tasks that counts who asks."""

    def __init__(self) -> None:
        self.free = 0
        self.changes = 0
        self.num_asked = 0

    async def version(self, run_id: str, topic: Topic) -> int:
        """Change number."""
        return self.changes

    async def lease(self) -> int | None:
        """One of the free tasks."""
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.free == 0:
            return None
        self.free -= 1
        return self.free

    def add(self, number: int) -> None:
        """More of them."""
        self.free += number
        self.changes += 1


@asynccontextmanager
async def waiting_for(
    tasks: Tasks, waiting: LongPoll, *, seconds: float = 60.0, line: str | None = "train"
) -> AsyncIterator[list[asyncio.Task[int | None]]]:
    """Many callers, once those who ask have asked and got nothing."""

    def call() -> Awaitable[int | None]:
        return waiting.until("run", Topic.TASKS, seconds, tasks.lease, line)

    callers = [asyncio.ensure_future(call()) for _ in range(MANY)]
    await asyncio.sleep(0.01)
    yield callers
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)


async def asked_after(tasks: Tasks, change: Callable[[], None]) -> int:
    """How many asked because of a change that brought nothing."""
    await asyncio.sleep(0.2)
    before = tasks.num_asked
    change()
    await asyncio.sleep(0.2)
    return tasks.num_asked - before


@pytest.mark.parametrize(("line", "all_ask"), [("train", False), (None, True)])
async def test_only_the_first_in_line_ask_again(line: str | None, all_ask: bool) -> None:
    """Negative control: without a line everybody does."""
    tasks = Tasks()
    async with waiting_for(tasks, LongPoll(tasks), line=line):
        asked = await asked_after(tasks, lambda: tasks.add(0))
    assert (asked >= MANY) is all_ask


@pytest.mark.parametrize(("line", "all_ask"), [("train", False), (None, True)])
async def test_queued_calls_make_no_attempt(line: str | None, all_ask: bool) -> None:
    """They would get nothing either; negative control: without a line everybody asks."""
    tasks = Tasks()
    async with waiting_for(tasks, LongPoll(tasks), line=line):
        assert (tasks.num_asked >= MANY) is all_ask


async def test_a_call_that_does_not_wait_attempts_immediately() -> None:
    """However many wait: it wants to know what there is now."""
    tasks = Tasks()
    waiting = LongPoll(tasks)
    async with waiting_for(tasks, waiting):
        tasks.free = 1  # not noticed yet
        assert await waiting.until("run", Topic.TASKS, 0, tasks.lease, "train") == 0


async def test_everybody_in_line_is_served() -> None:
    """Each who got something leaves its place to the next."""
    tasks = Tasks()
    async with waiting_for(tasks, LongPoll(tasks)) as callers:
        tasks.add(MANY)
        assert sorted(await asyncio.gather(*callers)) == list(range(MANY))  # type: ignore[type-var]


async def test_a_cancelled_call_leaves_its_place() -> None:
    """A caller that went away takes no task, and does not hold up the line."""
    tasks = Tasks()
    async with waiting_for(tasks, LongPoll(tasks)) as callers:
        for caller in callers[: MANY // 2]:
            caller.cancel()
        tasks.add(MANY)
        await asyncio.gather(*callers[MANY // 2 :])
        assert tasks.free == MANY // 2


async def test_those_behind_answer_when_their_time_is_up_or_the_service_ends() -> None:
    """With None, as the first ones do."""
    tasks = Tasks()
    waiting = LongPoll(tasks)
    async with waiting_for(tasks, waiting, seconds=0.1) as callers:
        assert set(await asyncio.gather(*callers)) == {None}
    tasks.num_asked = 0
    async with waiting_for(tasks, waiting) as callers:
        waiting.drain()
        assert set(await asyncio.gather(*callers)) == {None}


def test_a_run_that_stands_still_is_read_less_often() -> None:
    """And as often as before once something changes."""
    reading = Reading()
    reading.take(7, now=0.0)
    busy = reading.seconds
    for now in range(50):
        reading.take(7, now=float(now))
    assert reading.seconds == 5 * busy
    reading.take(8, now=51.0)
    assert reading.seconds == busy
