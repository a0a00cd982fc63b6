"""Runs the blocking calls of one episode in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from seamflow.processes.left_processes import exit_if_forked
from seamflow.user_code.user_calls import ordinary

_Call = tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]


class EpisodeThread:
    """A thread that makes calls one after the other; it starts with the first.

    A daemon: a call that never returns neither holds other episodes nor the end of the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `function(*arguments)`. Cancelling the wait does not stop the function."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._calls.put((loop, future, function, arguments))
        return await future

    def end(self) -> None:
        """End the thread after the calls that it has."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            loop, future, function, arguments = call
            if future.cancelled():
                continue
            pid = os.getpid()
            try:
                result, error = function(*arguments), None
            except BaseException as raised:  # exit() too, or nobody would ever get an answer
                result, error = None, ordinary(raised)
            exit_if_forked(pid)
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if isinstance(error, StopIteration):  # a future cannot hold one
        error = RuntimeError(repr(error))
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
