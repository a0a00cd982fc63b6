"""An asyncio event loop whose clock jumps: whoever sleeps an hour wakes at once, in order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run"]

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Instead of waiting for sockets, lets the time pass that nobody has anything to do in."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits for somebody else: nothing will ever happen")
        self.now += max(timeout, 0.0)
        return []


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time, which begins at 0 and stands still while code runs.

    Nothing in it may use threads, sockets or processes. Raises `RuntimeError` for a deadlock.
    """
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(main)
