"""A mailbox: calls from an event loop that another thread runs between its steps."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Mailbox:
    """The only way into a thread that owns its state: no lock guards anything else."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answers are delivered on `loop`."""
        self._loop = loop
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, function: Callable[[], None]) -> None:
        """Queue `function`, without waiting for it."""
        self._calls.put(function)

    async def call(self, function: Callable[[], T]) -> T:
        """Queue `function` and await its result."""
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
        """From the thread: call `callback` on the event loop; no effect once the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)

    def run_pending(self, *, wait: bool) -> None:
        """Run all queued calls; with `wait`, block until there is one."""
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
