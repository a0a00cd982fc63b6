"""One event loop for all inputs, so that servers and clients of a check can be kept."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Coroutine
from functools import cache
from typing import TypeVar

Result = TypeVar("Result")


def run(work: Coroutine[None, None, Result]) -> Result:
    """The result of `work`, in the loop that all checks share."""
    return _runner().run(work)


@cache
def _runner() -> asyncio.Runner:
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner
