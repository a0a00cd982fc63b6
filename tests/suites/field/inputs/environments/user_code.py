"""Tools, resets and steps that call `exit()` and the like: an error of that call, no more."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies
from seamflow.environment import Step
from seamflow.errors import PreconditionError

from services.tool_loop.python_tool import python_tool
from services.tool_loop.tool import ToolError
from tests.suites.field.kind import Kind
from tests.suites.field.servers.environment_server import episode_of

__all__ = ["KINDS"]


class Panic(BaseException):
    """As extensions in Rust raise it."""


@dataclass(frozen=True, slots=True)
class Exits:
    """A call that would end a process."""

    raised: BaseException
    way: str = "raise"
    """Of an asynchronous call: raise, or let a task raise it that `gather` or `wait_for` makes."""


def _raise(error: BaseException) -> None:
    if isinstance(error, SystemExit):
        sys.exit(error.code)
    raise error


async def _raise_later(error: BaseException) -> None:
    await asyncio.sleep(0)
    _raise(error)


async def _raise_in(exits: Exits) -> None:
    if exits.way == "gather":
        await asyncio.gather(_raise_later(exits.raised), asyncio.sleep(0))
    elif exits.way == "wait_for":
        await asyncio.wait_for(_raise_later(exits.raised), 10)
    elif exits.way == "task":
        await asyncio.create_task(_raise_later(exits.raised))
    else:
        await _raise_later(exits.raised)


async def check_environment(exits: Exits) -> None:
    """The episode fails and names what was raised; another episode of the server goes on."""
    for is_async, at_reset in itertools.product((False, True), (False, True)):
        work: Callable[[], Any]
        work = (lambda: _raise_in(exits)) if is_async else (lambda: _raise(exits.raised))
        try:
            await episode_of(work, is_async=is_async, at_reset=at_reset)
        except PreconditionError as error:
            if error.reason != "ENVIRONMENT_FAILED" or repr(exits.raised) not in str(error):
                raise
        else:
            raise AssertionError("no failure")
        if not (await episode_of(lambda: Step(done=True), is_async=is_async)).done:
            raise AssertionError("the next episode failed")


async def check_tool(exits: Exits) -> None:
    """The policy is told, as of each other exception."""

    def stops() -> None:
        _raise(exits.raised)

    async def stops_later() -> None:
        await _raise_in(exits)

    for function in (stops, stops_later):
        tool = python_tool(function, "tools[0]", timeout=20.0)
        try:
            await tool.call({})
        except ToolError as error:
            if repr(exits.raised) not in str(error):
                raise
        else:
            raise AssertionError("no error")


EXAMPLES = [
    Exits(raised, way)
    for raised in (SystemExit(), SystemExit(3), KeyboardInterrupt(), Panic("at the disco"))
    for way in ("raise", "gather", "wait_for", "task")
] + [Exits(asyncio.CancelledError())]
GENERATED = strategies.builds(
    Exits,
    strategies.one_of(
        strategies.integers(0, 255).map(SystemExit),
        strategies.text(max_size=5).map(SystemExit),
        strategies.text(max_size=5).map(Panic),
    ),
    strategies.sampled_from(("raise", "gather", "wait_for", "task")),
)

KINDS = (
    Kind(
        name="exits of environments",
        check=check_environment,
        examples=EXAMPLES,
        generated=GENERATED,
        long=300,
    ),
    Kind(name="exits of tools", check=check_tool, examples=EXAMPLES, generated=GENERATED),
)
