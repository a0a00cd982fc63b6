"""Tools, resets and steps that call `exit()` and the like: an error of that call, no more."""

from __future__ import annotations

import asyncio
import itertools
import json
import keyword
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies
from seamflow.environment import Step
from seamflow.environment.environment_class import EnvironmentClass
from seamflow.environment.v1 import environment_service_pb2 as pb
from seamflow.errors import PreconditionError

from services.tool_loop.toolbox import Tool, ToolError, python_tool
from tests.suites.field.kind import Kind
from tests.suites.field.servers.environment_server import episode_of


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

NAMES = (
    "model_extra", "model_config", "model_fields", "model_dump", "_x", "__y", "_", "schema", "json",
    "copy", "dict", "validate", "self", "cls", "function", "arguments", "named", "given", "ß", "x",
)  # fmt: skip
PARAMETERS = strategies.lists(
    strategies.sampled_from(NAMES) | strategies.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True),
    min_size=1,
    max_size=4,
    unique=True,
).map(lambda names: tuple(name for name in names if not keyword.iskeyword(name)))


async def check_parameters(names: tuple[str, ...]) -> None:
    """A tool gets each argument under the name that its function gives it, whatever the name."""
    scope: dict[str, Any] = {}
    exec(f"def tool({', '.join(names)}):\n    return locals()", scope)
    made = python_tool(scope["tool"], "tools[0]", 5.0)
    given = {name: index for index, name in enumerate(names)}
    if set(made.parameters.get("properties", ())) != set(names):
        raise AssertionError(f"its schema is {made.parameters}")
    if (found := json.loads(await made.call(given))) != given:
        raise AssertionError(f"it got {found}")


def check_name(given: tuple[str, bool]) -> None:
    """A tool's name is taken as the Model Context Protocol allows it, or refused at the start."""
    name, is_right = given
    tool = Tool(name=name, description="", parameters={}, origin="tools[0]", call=_never_called)
    try:
        declared(tool)
    except ValueError as error:
        if is_right or "give a name of 1 to 128 characters" not in str(error):
            raise
        return
    if not is_right:
        raise AssertionError("it was taken")


async def _never_called(given: Any) -> str:
    raise AssertionError(given)


def declared(tool: Tool) -> EnvironmentClass:
    """An environment with this tool."""
    return EnvironmentClass(
        name="e",
        make=object,
        kind=pb.ENVIRONMENT_KIND_STEPPED,
        tools=[tool.schema()],
        tasks=(),
        max_episodes=1,
        is_seeded=False,
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
    Kind(
        name="tool parameters",
        check=check_parameters,
        examples=[("model_extra", "_x"), NAMES],
        generated=PARAMETERS,
        short=20,
    ),
    Kind(
        name="tool names",
        check=check_name,
        examples=[("a" * 65, True), ("a" * 128, True), ("a" * 129, False), ("", False)],
        generated=strategies.integers(1, 300).map(lambda n: ("t" * n, n <= 128)),
    ),
)
