"""Background tasks that run concurrently with training; a failure aborts training."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

_CHECK_SECONDS = 1.0
"""A task that starts while training is being waited for is noticed within this time."""


class BackgroundTask:
    """A slot for one background task at a time. After a failure it accepts no further task."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background; the task before it must be done and successful."""
        assert self._task is None, "a task is in flight"
        self._task = asyncio.create_task(work)

    async def wait(self) -> None:
        """Wait until no task is in flight. Raises the task's error, in every caller."""
        task = self._task
        if task is None:
            return
        await asyncio.wait({task})  # cancelling the caller does not cancel the task
        task.result()
        if self._task is task:
            self._task = None

    @property
    def running(self) -> set[asyncio.Task[None]]:
        return {task for task in self.tasks if not task.done()}

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """The task that is in flight, failed, or is done and not yet waited for."""
        return set() if self._task is None else {self._task}

    def raise_if_failed(self) -> None:
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()


async def run_with_background(main: Coroutine[Any, Any, None], *background: BackgroundTask) -> None:
    """Run `main`; a failing background task aborts it immediately with that task's error."""
    task = asyncio.ensure_future(main)
    try:
        while not task.done():
            running = {each for slot in background for each in slot.running}
            await asyncio.wait(
                {task, *running}, timeout=_CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            for slot in background:
                slot.raise_if_failed()
        await task
    finally:
        await _cancel({task, *(each for slot in background for each in slot.tasks)})


async def _cancel(tasks: set[asyncio.Future[None]]) -> None:
    """Cancel the tasks that are not done and wait for them, ignoring their results."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
