"""What only a server of OpenEnv does: its capacity, its errors, its death, its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from seamflow.environment import EnvironmentClient, Task
from seamflow.errors import PreconditionError

from tests.lib.environments.contract.case import Case
from tests.lib.environments.contract.cases import OPENENV, openenv_server
from tests.lib.environments.contract.checks import connected, contents, named, waits_for_room

TASK = Task(task_id="t", payload={})
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(OPENENV.cannot_run()), reason=OPENENV.cannot_run()),
]


def said(text: str) -> dict[str, Any]:
    """A message of the policy."""
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    """One server for the tests of this module."""
    with openenv_server(max_sessions=2) as found:
        arguments = {**OPENENV.arguments, **found}
        yield replace(OPENENV, arguments=arguments, backend=lambda: nullcontext({}))


async def test_its_capacity_is_waited_for() -> None:
    """The environment server has room, the server of OpenEnv has not."""
    full = replace(OPENENV, backend=lambda: openenv_server(max_sessions=1))
    async with connected(full) as client:
        await waits_for_room(full, client)


async def test_an_error_of_its_code_is_a_failure_of_the_environment(case: Case) -> None:
    """And names what was raised."""
    async with connected(case) as client, await client.reset(TASK, 1) as episode:
        with pytest.raises(PreconditionError, match="EXECUTION_ERROR: no disk") as raised:
            await episode.step(said("raise"))
    assert raised.value.metadata["failure_class"] == "ENVIRONMENT"


async def test_its_death_is_a_failure_of_the_infrastructure() -> None:
    """In the middle of a step."""
    async with connected(OPENENV) as client, await client.reset(TASK, 1) as episode:
        with pytest.raises(PreconditionError, match="connection to http") as raised:
            await episode.step(said("die"))
    assert raised.value.metadata["failure_class"] == "INFRASTRUCTURE"


async def test_actions_may_be_tool_calls_of_its_schema(case: Case) -> None:
    """A call with wrong arguments is answered with what is wrong."""
    arguments = {"url": case.arguments["url"], "observation_field": "text"}
    async with (
        connected(replace(case, arguments=arguments)) as client,
        await client.reset(TASK, 1) as episode,
    ):
        tools = episode.observation.tools or ()
        (function,) = [tool["function"] for tool in tools]
        assert list(function["parameters"]["properties"]) == ["text"]
        step = await episode.step(call({"texts": "1"}))
        assert "text: Field required" in contents(step)[0]
        await episode.step(call({"text": "1"}))


def call(arguments: dict[str, str]) -> dict[str, Any]:
    """A message with a call of the tool."""
    function = {"name": "act", "arguments": json.dumps(arguments)}
    return {**said(""), "tool_calls": [{"id": "c", "type": "function", "function": function}]}


async def test_rewards_may_be_bool_or_null(case: Case) -> None:
    """They are 1 and 0."""
    async with connected(case) as client:
        seen = [await first_reward(client, str(number)) for number in range(1, 10)]
    assert sorted(seen) == [0.0] * 8 + [1.0]


async def first_reward(client: EnvironmentClient, text: str) -> float:
    """The reward of an episode's first answer."""
    async with await client.reset(TASK, 1) as episode:
        return named(await episode.step(said(text)))["reward"]
