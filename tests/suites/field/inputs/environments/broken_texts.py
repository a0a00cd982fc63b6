"""Texts with halves of characters: replaced, so that no episode fails by them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies
from seamflow.client.messages import to_dict, to_messages
from seamflow.environment import EnvironmentFailed, Observation, Step
from seamflow.errors import PreconditionError

from services.tool_loop.toolbox import Tool, Toolbox, python_tool
from tests.suites.field.kind import Kind
from tests.suites.field.servers.environment_server import episode_of


def right_text(text: str) -> str:
    """What is right: each half is the replacement character, two halves are their character."""
    units = [ord(character) for character in text]
    found = ""
    while units:
        first = units.pop(0)
        if 0xD800 <= first < 0xDC00 and units and 0xDC00 <= units[0] < 0xE000:
            found += chr(0x10000 + ((first - 0xD800) << 10) + units.pop(0) - 0xDC00)
        else:
            found += "\ufffd" if 0xD800 <= first < 0xE000 else chr(first)
    return found


def _same(found: object, right: object) -> None:
    if found != right:
        raise AssertionError(f"found {found!r}")


async def check_environment(text: str) -> None:
    """In observations, tool messages, info and failures."""
    right = right_text(text)
    message = {"role": "tool", "tool_call_id": "c", "content": text}
    step = await episode_of(
        lambda: Step(messages=[message], info={text: text}, done=True, policy_failure=text)
    )
    assert not isinstance(step.messages, str)
    _same([each["content"] for each in step.messages], [right])
    _same(step.info, {right: right})
    _same(step.policy_failure, right)
    answers = iter(
        [
            Observation(messages=[{"role": "user", "content": text or "?"}], info={"x": text}),
            Step(done=True),
        ]
    )
    await episode_of(lambda: next(answers), at_reset=True)
    try:
        await episode_of(lambda: _fail(text))
    except PreconditionError as error:
        if right not in str(error):
            raise


def _fail(text: str) -> None:
    raise EnvironmentFailed(text)


async def check_tool(text: str) -> None:
    """What a function returns, alone or in a list, is read by the policy."""

    def says() -> Any:
        return text

    def lists() -> Any:
        return [text]

    tools: list[Tool] = [python_tool(each, "tools", timeout=20.0) for each in (says, lists)]
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("says", "lists")
    ]
    answers = await Toolbox(tools, 10_000).answers(calls)
    message, listed = (to_dict(each) for each in to_messages(answers).messages)
    _same(message["content"], right_text(text))
    _same(json.loads(listed["content"]), [right_text(text)])


HALVES = strategies.integers(0xD800, 0xDFFF).map(chr)
TEXTS = strategies.lists(HALVES | strategies.characters(), max_size=8).map("".join)
EXAMPLES = ["\ud83d", "a\ud83d b", "\ude00\ud83d", "\ud83d\ude00", "\ud83d" * 3, "plain", "😀"]

KINDS = (
    Kind(
        name="broken texts of environments",
        check=check_environment,
        examples=EXAMPLES,
        generated=TEXTS,
    ),
    Kind(name="broken texts of tools", check=check_tool, examples=EXAMPLES, generated=TEXTS),
)
