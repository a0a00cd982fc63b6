"""Watches that Redis keeps the settings that the durability promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from services.chassis.errors import ConfigError
from services.chassis.log import get_logger
from services.chassis.redis.connect import UNAVAILABLE_ERRORS
from services.chassis.redis.scripts import Scripts


@asynccontextmanager
async def watched(
    scripts: Scripts, check: Callable[[], Awaitable[None]], every_seconds: float
) -> AsyncIterator[None]:
    """While `check` raises `ConfigError`, the scripts refuse every call: nothing is acknowledged.

    Writes acknowledged between a change and the next check have the weaker class.
    """
    ended = asyncio.Event()
    task = asyncio.create_task(_watch(scripts, check, every_seconds, ended))
    try:
        yield
    finally:
        ended.set()  # not cancelled: redis-py may swallow a cancellation that meets a reply
        await task


async def _watch(
    scripts: Scripts,
    check: Callable[[], Awaitable[None]],
    every_seconds: float,
    ended: asyncio.Event,
) -> None:
    while not await _is_set_within(ended, every_seconds):
        try:
            await check()
        except ConfigError as error:
            if not scripts.refusal:
                get_logger().error("durability_broken", error=str(error))
            scripts.refusal = f"{error}; until then nothing is stored"
        except (*UNAVAILABLE_ERRORS, OSError):
            continue  # calls fail by themselves
        else:
            scripts.refusal = ""


async def _is_set_within(ended: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(ended.wait(), seconds)
    return ended.is_set()
