"""What only an MCP server does: tools, their rewards, its death."""

from __future__ import annotations

import json
from typing import Any

import pytest
from seamflow.environment import OpenEpisode, Step, Task
from seamflow.errors import PreconditionError

from tests.lib.environments.contract.cases import MCP_TOOLS
from tests.lib.environments.contract.checks import connected, contents, named

TASK = Task(task_id="t", payload={})
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MCP_TOOLS.cannot_run()), reason=MCP_TOOLS.cannot_run()),
]


async def guess(episode: OpenEpisode, number: object) -> Step:
    """Call the tool."""
    function = {"name": "guess", "arguments": json.dumps({"number": number})}
    call: dict[str, Any] = {"id": "c", "type": "function", "function": function}
    return await episode.step({"role": "assistant", "content": "", "tool_calls": [call]})


async def test_tools_are_called_and_their_reward_ends_the_episode() -> None:
    """The tools of reset and reward are hidden; a wrong argument is answered."""
    async with connected(MCP_TOOLS) as client, await client.reset(TASK, 1) as episode:
        tools = [tool["function"]["name"] for tool in episode.observation.tools or ()]
        assert tools == ["guess"]
        assert "number" in contents(await guess(episode, "x"))[0]
        for number in range(1, 10):
            step = await guess(episode, number)
            assert named(step)["reward"] == float(step.done)
            if step.done:
                return
    pytest.fail("no number was right")


async def test_its_death_is_a_failure_of_the_infrastructure() -> None:
    """In the middle of a call."""
    async with connected(MCP_TOOLS) as client, await client.reset(TASK, 1) as episode:
        with pytest.raises(PreconditionError) as raised:
            await guess(episode, -2)
    assert raised.value.metadata["failure_class"] == "INFRASTRUCTURE"
