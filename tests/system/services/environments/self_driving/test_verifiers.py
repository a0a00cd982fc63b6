"""verifiers as a self-driving environment, in real server processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from seamflow.environment import EnvironmentClient, Task
from seamflow.environment.v1 import environment_service_pb2 as pb
from seamflow.errors import PreconditionError

from tests.lib.environments.contract.case import Case
from tests.lib.environments.contract.checks import connected
from tests.lib.environments.self_driving.cases import VERIFIERS
from tests.lib.environments.self_driving.policy_server import Policy, policy_server
from tests.lib.environments.self_driving.words import FAILING, TASKS

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def case() -> Case:
    """Its own, if its venv is there."""
    if why := VERIFIERS.cannot_run():
        pytest.skip(why)
    return VERIFIERS


@pytest.fixture
async def client(case: Case) -> AsyncIterator[EnvironmentClient]:
    """Of its server."""
    async with connected(case) as found:
        await found.describe(timeout=120)
        yield found


@pytest.fixture
async def policy() -> AsyncIterator[Policy]:
    """A stand-in for the HTTP gateway."""
    async with policy_server() as found:
        yield found


def task(index: int) -> Task:
    """The task of a word."""
    return Task(task_id=TASKS[index], payload={"index": index})


async def run(client: EnvironmentClient, policy: Policy, index: int, answer: str) -> dict[str, Any]:
    """Rewards of an episode whose policy says `answer`."""
    endpoint = policy.endpoint(f"r{index}-{len(policy.answers)}", answer)
    found = await client.run_episode(task(index), endpoint, 1, timeout=120)
    return {reward.name: round(reward.value, 3) for reward in found.rewards}


async def test_an_episode_has_the_rewards_of_its_taskset(
    client: EnvironmentClient, policy: Policy
) -> None:
    """Their sum, and each by its name; the tasks are those of the taskset."""
    described = await client.describe()
    assert (described.kind, described.num_tasks) == (pb.ENVIRONMENT_KIND_SELF_DRIVING, len(TASKS))
    assert await run(client, policy, 0, "go up") == {"reward": 1.0, "said": 1.0, "length": 2.0}
    assert await run(client, policy, 0, "go down") == {"reward": 0.1, "said": 0.1, "length": 2.0}


async def test_an_empty_answer_is_no_failure(client: EnvironmentClient, policy: Policy) -> None:
    """It earns what the taskset gives for it, or nothing where its functions cannot take it."""
    assert await run(client, policy, 0, "") == {"reward": 0.0, "said": 0.0, "length": 0.0}


async def test_episodes_use_the_credential_of_their_rollout(
    client: EnvironmentClient, policy: Policy
) -> None:
    """Many at once, each with its own policy."""
    answers = ["up", "down", "left", "up"] * 2
    found = await asyncio.gather(
        *(run(client, policy, i % 4, answer) for i, answer in enumerate(answers))
    )
    assert [each["reward"] for each in found] == [1.0, 1.0, 1.0, 0.0] * 2
    assert len(policy.asked) == len(answers)
    assert all(key == f"key of {rollout}" for rollout, key in policy.asked)


async def test_an_error_of_the_taskset_is_a_failure_of_the_environment(
    client: EnvironmentClient, policy: Policy
) -> None:
    """Never a reward."""
    with pytest.raises(PreconditionError) as raised:
        await run(client, policy, FAILING, "up")
    assert raised.value.metadata["failure_class"] == "ENVIRONMENT", raised.value


async def test_a_policy_that_cannot_be_reached_is_a_failure_of_the_infrastructure(
    client: EnvironmentClient, policy: Policy
) -> None:
    """Never a reward."""
    endpoint = replace(policy.endpoint("r", "up"), base_url="http://127.0.0.1:9/v1")
    for wrong in (endpoint, replace(endpoint, base_url="")):
        with pytest.raises(PreconditionError) as raised:
            await client.run_episode(task(0), wrong, 1, timeout=120)
        assert raised.value.metadata["failure_class"] == "INFRASTRUCTURE", raised.value
