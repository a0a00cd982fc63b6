"""The contract of stepped environments, against real server processes of every adapter."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from seamflow.environment import EnvironmentClient

from tests.lib.environments.contract.case import Case
from tests.lib.environments.contract.cases import CASES, PLAIN
from tests.lib.environments.contract.checks import (
    Check,
    answers_bad_actions,
    answers_bad_tool_calls,
    connected,
    keeps_episodes_apart,
    repeats_by_seed,
    replaces_a_dead_server,
    waits_for_room,
)

HERE = "tests.lib.environments.contract"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=CASES, ids=lambda case: case.name, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    """An environment whose venv is there."""
    found: Case = request.param
    if why := found.cannot_run():
        pytest.skip(why)
    return found


@pytest.fixture
async def client(case: Case) -> AsyncIterator[EnvironmentClient]:
    """Of a server of the environment."""
    async with connected(case) as found:
        yield found


async def test_a_reset_is_repeatable_by_seed(case: Case, client: EnvironmentClient) -> None:
    """Start, answers and rewards are equal for equal seeds."""
    await repeats_by_seed(case, client)


async def test_two_episodes_do_not_mix(case: Case, client: EnvironmentClient) -> None:
    """Whatever the order of their calls."""
    await keeps_episodes_apart(case, client)


async def test_bad_actions_are_answered(case: Case, client: EnvironmentClient) -> None:
    """They are neither failures nor rewarded."""
    await answers_bad_actions(case, client)
    await answers_bad_tool_calls(case, client)


async def test_capacity_is_waited_for(case: Case) -> None:
    """A second episode of a server of one."""
    async with connected(case, max_episodes=1) as client:
        await waits_for_room(case, client)


async def test_a_dead_environment_replaces_its_rollouts(case: Case, tmp_path: Path) -> None:
    """Through a real gateway and a process that runs episodes."""
    await replaces_a_dead_server(case, tmp_path)


@pytest.mark.parametrize(
    ("broken", "check", "words"),
    [
        ("Unseeded", repeats_by_seed, "seed 1 gave"),
        ("DeafToSeeds", repeats_by_seed, "all seeds give"),
        ("Mixed", keeps_episodes_apart, "interleaved episodes gave"),
        ("Fragile", answers_bad_actions, "raised ValueError"),
        ("Fragile", answers_bad_tool_calls, "raised ValueError"),
        ("Generous", answers_bad_actions, "earned 1.0"),
        ("Generous", answers_bad_tool_calls, "earned"),
        ("Refuses", waits_for_room, "the second reset did not wait"),
    ],
)
async def test_a_broken_environment_is_noticed(broken: str, check: Check, words: str) -> None:
    """Negative controls."""
    case = replace(PLAIN, environment=f"{HERE}.plain:{broken}")
    async with connected(case) as client:
        with pytest.raises(AssertionError, match=words):
            await check(case, client)


async def test_a_server_that_forgets_and_rewards_is_noticed(tmp_path: Path) -> None:
    """Negative control: it gives an episode that it does not know the reward 0."""
    case = replace(PLAIN, command=(sys.executable, "-m", f"{HERE}.forgetful"))
    with pytest.raises(AssertionError, match="a dead environment gave a reward"):
        await replaces_a_dead_server(case, tmp_path)
