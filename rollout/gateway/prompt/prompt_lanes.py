"""Prompts are rendered and encoded by threads, in two lanes, off the event loop.

Short prompts never wait for long ones. Within a lane rollouts take turns, so that one with many
prompts delays the others by one; the last idle thread is not for a rollout that has one already,
whose prompts may each take as long as rendering may. Tokenizers release the interpreter's lock
while they encode, and templates are rendered by other processes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from services.chassis import metrics
from services.chassis.errors import Reason, exhausted

T = TypeVar("T")

_SHORT_BYTES = 32 * 1024
_SHORT_THREADS = 2
_LEAST_SHARE = 8
_SWITCH_SECONDS = 0.0005
_NICE = 10
_RETRY_SECONDS = 0.5
_WAITING = metrics.gauge(
    "rollout_gateway", "waiting_prompts", "Prompts that wait for a thread, by lane.", ("lane",)
)

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class PromptLanes:
    """Runs work on prompts in threads; close it when done."""

    def __init__(self, max_waiting: int) -> None:
        """At most `max_waiting` prompts wait in each lane."""
        # The event loop must not wait long for the interpreter's lock while a thread renders.
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._short = _Lane("short", _SHORT_THREADS, max_waiting)
        self._long = _Lane("long", 1, max_waiting)

    async def run(self, owner: str, num_bytes: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises; `num_bytes` is the size of what it works on.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED, too many wait, of this `owner` or of all.
        """
        lane = self._short if num_bytes <= _SHORT_BYTES else self._long
        result: T = await lane.run(owner, work)
        return result

    def close(self) -> None:
        """End the threads; work that waits is dropped."""
        self._short.close()
        self._long.close()


class _Lane:
    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, f"prompts-{name}", _yield_to_others)
        self._num_idle = num_threads
        self._most_of_one = max(1, num_threads - 1)
        self._running: Counter[str] = Counter()
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._gauge = _WAITING.labels(name)
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()

    async def run(self, owner: str, work: Callable[[], Any]) -> Any:
        self._check(owner)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(owner, deque()).append((work, done))
        self._count(1)
        self._start()
        return await done

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check(self, owner: str) -> None:
        ours = len(self._queues.get(owner, ()))
        share = max(self._max_waiting // (len(self._queues) + 1), _LEAST_SHARE)
        if self._num_waiting >= self._max_waiting or ours >= share:
            message = (
                f"{self._num_waiting} prompts wait to be encoded, {ours} of this rollout, and "
                f"max_waiting_prompts is {self._max_waiting} for all: retry later"
            )
            raise exhausted(Reason.TOO_MANY_REQUESTS, message, _RETRY_SECONDS)

    def _start(self) -> None:
        while self._num_idle and (owner := self._next_owner()) is not None:
            work, done = self._next(owner)
            if not done.cancelled():
                self._num_idle -= 1
                self._running[owner] += 1
                running = asyncio.get_running_loop().run_in_executor(self._threads, work)
                running.add_done_callback(partial(self._ended, owner, done))

    def _next_owner(self) -> str | None:
        """Whose turn it is; None: nobody waits who may have a thread."""
        most = self._most_of_one
        free = (owner for owner in self._queues if self._running.get(owner, 0) < most)
        return next(free, None)

    def _next(self, owner: str) -> _Job:
        queue = self._queues[owner]
        job = queue.popleft()
        self._count(-1)
        del self._queues[owner]
        if queue:
            self._queues[owner] = queue  # at the end
        return job

    def _ended(self, owner: str, done: asyncio.Future[Any], running: asyncio.Future[Any]) -> None:
        self._num_idle += 1
        self._running -= Counter([owner])  # drops those that have none
        self._start()
        if running.cancelled():
            done.cancel()
        elif (error := running.exception()) is not None and not done.done():
            done.set_exception(error)
        elif not done.done():
            done.set_result(running.result())

    def _count(self, change: int) -> None:
        self._num_waiting += change
        self._gauge.set(self._num_waiting)


def _yield_to_others() -> None:
    """Give this thread less of a busy core than the event loop gets; Linux has it by thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
