"""What only Gymnasium has: spaces of actions, truncation, answers that are none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from seamflow.environment import EnvironmentClient, Step, Task

from tests.lib.environments.contract.cases import GYMNASIUM
from tests.lib.environments.contract.checks import connected, contents, named

TASK = Task(task_id="t", payload={})
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(GYMNASIUM.cannot_run()), reason=GYMNASIUM.cannot_run()),
]


async def first_step(client: EnvironmentClient, text: str, **call: Any) -> Step:
    """The answer to an episode's first message, which calls the tool `act` with `call`, if any."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if call:
        function = {"name": "act", "arguments": json.dumps(call)}
        message["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
    async with await client.reset(TASK, 1) as episode:
        return await episode.step(message)


async def test_actions_are_indices_names_or_tool_calls() -> None:
    """All three move the pole in the same way."""
    arguments = {"env_id": "CartPole-v1", "action_names": ["left", "right"], "use_tool": True}
    async with connected(replace(GYMNASIUM, arguments=arguments)) as client:
        right = contents(await first_step(client, "not left but Right"))
        assert contents(await first_step(client, "1")) == right
        assert contents(await first_step(client, "", action="right")) == right
        assert contents(await first_step(client, "left")) != right
        assert "one of the words left, right" in contents(await first_step(client, "up"))[0]
        assert "no argument" in contents(await first_step(client, "", move=1))[0]


async def test_actions_of_a_box_are_json() -> None:
    """A value outside it is no action."""
    arguments = {"env_id": "Pendulum-v1"}
    async with connected(replace(GYMNASIUM, arguments=arguments)) as client:
        assert named(await first_step(client, "I choose [0.5]"))["reward"] < 0
        for text in ("[3]", "[0, 0]", "0.5 or so", "[1, "):
            assert named(await first_step(client, text))["reward"] == 0, text


async def test_a_time_limit_truncates_and_unreadable_answers_end() -> None:
    """The first counts its rewards, the second is a failure of the policy."""
    arguments = {"env_id": "CartPole-v1", "kwargs": {"max_episode_steps": 2}, "max_unreadable": 2}
    async with connected(replace(GYMNASIUM, arguments=arguments)) as client:
        async with await client.reset(TASK, 1) as episode:
            steps = [await episode.step({"role": "assistant", "content": "1"}) for _ in range(2)]
        assert [(step.done, step.truncated) for step in steps] == [(False, False), (False, True)]
        async with await client.reset(TASK, 1) as episode:
            steps = [await episode.step({"role": "assistant", "content": "?"}) for _ in range(2)]
        assert [step.done for step in steps] == [False, True]
        assert "2 answers were no action" in steps[1].policy_failure
