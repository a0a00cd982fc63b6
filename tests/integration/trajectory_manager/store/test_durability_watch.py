"""The watch on Redis' settings ends with the store, whatever the client does meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

from services.chassis.errors import ConfigError
from services.chassis.redis.scripts import Scripts
from trajectory_manager.store.redis.connect import watched


class _Refusing:
    """In the place of the scripts: only what the watch sets."""

    refusal = ""


def scripts() -> Scripts:
    """Scripts that store nothing."""
    return cast(Scripts, cast(Any, _Refusing()))


async def test_the_watch_ends_although_its_client_swallows_a_cancellation() -> None:
    """As redis-py does when one meets a reply; a store that waited for it was never closed."""
    checking, replied = asyncio.Event(), asyncio.Event()

    async def check() -> None:
        checking.set()
        with suppress(asyncio.CancelledError):
            await replied.wait()

    async def use() -> None:
        async with watched(scripts(), check, every_seconds=0.001):
            await checking.wait()
            asyncio.get_running_loop().call_soon(replied.set)

    using = asyncio.create_task(use())
    done, _ = await asyncio.wait([using], timeout=60)
    using.cancel()
    assert done == {using}


async def test_a_setting_that_breaks_the_promise_refuses_until_it_is_mended() -> None:
    """The refusal says what is wrong."""
    wrong = ["appendfsync is no"]
    watching = scripts()

    async def check() -> None:
        if wrong:
            raise ConfigError(wrong[0])

    async with watched(watching, check, every_seconds=0.001):
        while not watching.refusal:
            await asyncio.sleep(0.001)
        assert watching.refusal == "appendfsync is no; until then nothing is stored"
        wrong.clear()
        while watching.refusal:
            await asyncio.sleep(0.001)
