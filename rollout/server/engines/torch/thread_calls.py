"""Calls from an event loop, run by another thread where that thread says so."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["Mailbox"]

T = TypeVar("T")


class Mailbox:
    """The only way into a thread that owns its state: no lock guards anything else."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answers are delivered on `loop`."""
        self._loop = loop
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, function: Callable[[], None]) -> None:
        """Have `function` run, with no answer."""
        self._calls.put(function)

    async def call(self, function: Callable[[], T]) -> T:
        """Have `function` run; return or raise what it does."""
        answer: asyncio.Future[T] = self._loop.create_future()
        self._calls.put(lambda: self._run(function, answer))
        return await answer

    def _run(self, function: Callable[[], T], answer: asyncio.Future[T]) -> None:
        try:
            result = function()
        except Exception as error:
            self.notify(_settle, answer, None, error)
        else:
            self.notify(_settle, answer, result, None)

    def notify(self, callback: Callable[..., object], *args: object) -> None:
        """From the thread: call on the event loop, unless that has ended before its engine."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)

    def run_pending(self, *, wait: bool) -> None:
        """Run everything that waits; with `wait`, wait for the first."""
        if wait:
            self._calls.get()()
        while not self._calls.empty():
            self._calls.get()()


def _settle(answer: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
