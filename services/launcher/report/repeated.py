"""What is done again and again beside a run, whatever it raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.chassis.log import get_logger
from services.launcher.report.view import View


async def repeated(
    view: View, what: str, act: Callable[[], Awaitable[None]], seconds: float
) -> None:
    """Call `act` every `seconds` until cancelled; each of its errors is told once."""
    told = set[str]()
    while True:
        try:
            await act()
        except Exception as error:  # whatever it is, the next call may show an alarm
            if (text := f"{type(error).__name__}: {error}") not in told:
                told.add(text)
                get_logger().exception("watching_failed", what=what)
                view.note(f"{what} failed, and is repeated: {text}")
        await asyncio.sleep(seconds)
