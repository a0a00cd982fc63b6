"""An asyncio event loop whose clock jumps: whoever sleeps an hour wakes at once, in order."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

_AT_ONCE = 1e-9
"""Seconds: calls nearer to each other are of the same time, which sums of floats may miss."""


class _Call(list[Any]):
    """[when, number, callback, arguments, context]: a list, which the heap compares in no time."""

    def cancel(self) -> None:
        """Never call."""
        self[2] = None


class _VirtualTimeLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as futures, tasks and sleep need: no sockets, threads, processes.

    Calls of the same time are made in the order in which they were asked for.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = count()
        self._soon: deque[_Call] = deque()
        self._later: list[_Call] = []

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Call:
        call = _Call((self._now, 0, callback, args, context))
        self._soon.append(call)
        return call

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> _Call:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> _Call:
        call = _Call((when, next(self._numbers), callback, args, context))
        heapq.heappush(self._later, call)
        return call

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        logging.getLogger(__name__).error(context["message"], exc_info=context.get("exception"))

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        asyncio._set_running_loop(self)
        try:
            while not task.done() or self._soon:
                self._make_calls()
        finally:
            asyncio._set_running_loop(None)
        return task.result()

    def _make_calls(self) -> None:
        """All that are due now; if there are none, time passes until there is one."""
        soon, later = self._soon, self._later
        if not soon:
            while later and later[0][2] is None:
                heapq.heappop(later)
            if not later:
                raise RuntimeError("everybody waits for somebody else: nothing will ever happen")
            self._now = max(later[0][0], self._now)
        while later and later[0][0] < self._now + _AT_ONCE:
            soon.append(heapq.heappop(later))
        for _ in range(len(soon)):
            _, _, callback, args, context = soon.popleft()
            if callback is None:
                continue
            if context is None:
                callback(*args)
            else:
                context.run(callback, *args)


class Clock:
    """The event loop's clock."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """Seconds."""
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """Let seconds pass."""
        await asyncio.sleep(seconds)

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back at a time."""
        return self._loop.call_at(when, callback)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time, which begins at 0 and stands still while code runs.

    Nothing in it may use threads, sockets or processes. Raises `RuntimeError` for a deadlock.
    """
    loop = _VirtualTimeLoop()  # type: ignore[abstract]  # the rest is not implemented
    result: T = loop.run_until_complete(main)
    return result
