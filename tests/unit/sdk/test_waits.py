"""What a process waits for: noted while it lasts, and forgotten when it is over."""

from __future__ import annotations

import asyncio

import pytest
from seamflow import waits
from seamflow.waits import in_background


class Clock:
    """The clock of `waits`, moved by hand."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waits, "time", clock)
    monkeypatch.setattr(waits, "_waits", {})
    return clock


def reasons() -> list[tuple[str, float]]:
    return [(each.reason, each.since) for each in waits.current()]


def test_a_wait_lasts_as_long_as_its_context(clock: Clock) -> None:
    """From its first reason on; a moment is no wait."""
    with waits.waiting() as wait:
        clock.now += 5
        assert reasons() == []
        wait.say("a call: no answer")
        assert reasons() == []
        clock.now += 2
        wait.say("a call: refused")
        assert reasons() == [("a call: refused", 1005.0)]
    assert reasons() == []


def test_a_refusal_that_comes_again_is_one_wait(clock: Clock) -> None:
    """With the first time and the last reason; it is forgotten when it does not come again."""
    for reason in ("full", "full", "silent"):
        waits.note("store", reason, "Free some.")
        clock.now += 5
    assert reasons() == [("silent", 1000.0)]
    clock.now += 30
    assert reasons() == []
    waits.note("store", "full")
    clock.now += 2
    assert reasons() == [("full", 1045.0)]


def test_what_does_not_come_back_stays(clock: Clock) -> None:
    """Such as a task in the background that has ended."""
    waits.note("task", "the watch has ended", forgets=False)
    clock.now += 3600
    assert reasons() == [("the watch has ended", 1000.0)]


def test_many_calls_that_wait_for_one_thing_are_told_once(clock: Clock) -> None:
    """Since the oldest of them."""
    with waits.waiting() as first, waits.waiting() as second:
        first.say("a call: no answer")
        clock.now += 2
        second.say("a call: no answer")
        clock.now += 2
        assert reasons() == [("a call: no answer", 1000.0)]


async def test_a_background_task_that_ends_by_an_error_is_waited_for_until_the_process_ends(
    clock: Clock,
) -> None:
    """One that returns, or is cancelled, is not."""

    async def fail() -> None:
        raise KeyError("node")

    tasks = [in_background(asyncio.sleep(0), "ending"), in_background(asyncio.sleep(9), "sleeping")]
    tasks.append(in_background(fail(), "following nodes"))
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    clock.now += 3600
    assert [reason for reason, _ in reasons()] == [
        "its task 'following nodes', which has ended by KeyError: 'node'"
    ]
