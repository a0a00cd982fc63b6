"""An environment server whose step does what a check gives it; kept for all inputs."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

from seamflow.environment import EnvironmentClient, Step, Task, serving

from tests.suites.field import event_loop

logging.getLogger("seamflow.environment").addHandler(logging.NullHandler())  # failures are wanted
WORK: dict[str, Callable[[], Any]] = {}
"""What reset or step of a task does, by its id."""


class Sync:
    """Its methods run in a thread of the episode's own."""

    def reset(self, task: Task, seed: int) -> Any:
        """Does the work if the task is to fail at its reset."""
        self._work = WORK[task.task_id]
        return self._work() if task.payload.get("at_reset") else "go"

    def step(self, message: Any) -> Any:
        """Does the work."""
        return self._work()


class Async:
    """Its methods run on the server's event loop."""

    async def reset(self, task: Task, seed: int) -> Any:
        """Does the work if the task is to fail at its reset."""
        self._work = WORK[task.task_id]
        return await self._done() if task.payload.get("at_reset") else "go"

    async def step(self, message: Any) -> Any:
        """Does the work."""
        return await self._done()

    async def _done(self) -> Any:
        result = self._work()
        return await result if hasattr(result, "__await__") else result


async def episode_of(
    work: Callable[[], Any], *, is_async: bool = False, at_reset: bool = False
) -> Step:
    """The answer to one step in an episode of its own, whose environment does `work`.

    `work` of an asynchronous environment may give an awaitable.
    """
    client = await _client(is_async)
    name = f"t{len(WORK)}"
    WORK[name] = work
    task = Task(task_id=name, payload={"at_reset": at_reset})
    async with await client.reset(task) as episode:
        return await episode.step({"role": "assistant", "content": "act"}, timeout=20.0)


_clients: dict[bool, EnvironmentClient] = {}


async def _client(is_async: bool) -> EnvironmentClient:
    if is_async not in _clients:
        port = await _stack().enter_async_context(serving(Async if is_async else Sync))
        connected = EnvironmentClient(f"127.0.0.1:{port}")
        _clients[is_async] = await _stack().enter_async_context(connected)
    return _clients[is_async]


@cache
def _stack() -> AsyncExitStack:
    stack = AsyncExitStack()
    atexit.register(lambda: event_loop.run(stack.aclose()))
    return stack
