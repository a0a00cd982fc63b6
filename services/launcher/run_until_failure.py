"""Do the work of a run until it ends, a child process fails, or Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from contextlib import suppress
from typing import NoReturn, TypeVar

from services.launcher.supervisor import Supervisor

T = TypeVar("T")


async def run_until_failure(
    processes: Supervisor, work: Awaitable[T], *watches: Awaitable[NoReturn]
) -> T:
    """Run `work` until it ends, a child or a watch fails, or Ctrl-C; a second one kills all."""
    loop = asyncio.get_running_loop()
    working = asyncio.ensure_future(work)
    failing = [asyncio.ensure_future(each) for each in (processes.failure(), *watches)]
    asked: list[int] = []

    def on_signal(number: int) -> None:
        asked.append(number)
        if len(asked) > 1:
            processes.kill()
            os._exit(128 + number)
        working.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    await asyncio.wait({working, *failing}, return_when=asyncio.FIRST_COMPLETED)
    failed = [each for each in reversed(failing) if each.done()]  # a watch knows the cause
    for each in set(failing) - set(failed):
        each.cancel()
    if failed:
        working.cancel()
        await asyncio.wait([working])
        with suppress(asyncio.CancelledError):
            working.exception()  # a consequence of the failure
        failed[0].result()
    try:
        return await working
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
