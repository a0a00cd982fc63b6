"""Episodes from lease to finish, through a real gateway: rewards, failures, limits, seeds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import (
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)

from services.environments.episode import episode_seed
from services.environments.episode_loop import failure_class
from tests.lib.environments.stepped import Counting, Crowd, Drives, Fragile
from tests.lib.environments.support import World, rewards_of, served, working, world
from tests.lib.redis_server import free_port
from trajectory_manager.model.records import Purpose

ROOT = Path(__file__).parents[4]
HERE = "tests/lib/environments/stepped.py:"

TIMEOUT = tokens_pb2.FAILURE_CLASS_TIMEOUT
ENVIRONMENT = tokens_pb2.FAILURE_CLASS_ENVIRONMENT
INFRASTRUCTURE = tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[World]:
    """A run whose policy always says "hello"."""
    async with world(tmp_path) as found:
        found.always_say("hello")
        yield found


async def test_an_episode_becomes_a_finished_rollout(run: World) -> None:
    """Each turn continues the one before; the rewards of the steps add up by name."""
    await run.submit('{"turns": 3}')
    async with served(Counting) as environment, working(run, environment):
        (found,) = await run.ended(1)
    assert rewards_of(found) == {("reward", ""): 3.0, ("length", ""): 15.0}
    assert len(found.turns) == 3
    assert [t.prefix_turn_id for t in found.turns] == ["", *(t.turn_id for t in found.turns[:2])]
    prompts = [run.template.text(prompt) for prompt in run.server.prompts]
    assert "<tools>" in prompts[0]
    assert "count" in prompts[0]
    assert prompts[2].count("hello") == 2
    assert prompts[2].count("more") == 2


async def test_rewards_of_steps_may_go_to_their_turns(run: World) -> None:
    """The rollout's own are then 0."""
    await run.submit('{"turns": 2}')
    async with (
        served(Counting) as environment,
        working(run, environment, reward_per_turn=True),
    ):
        (found,) = await run.ended(1)
    values = rewards_of(found)
    assert values[("reward", "")] == 0.0
    assert [values[("reward", turn.turn_id)] for turn in found.turns] == [1.0, 1.0]


async def test_an_episode_beyond_max_turns_is_cut_off_and_counts(run: World) -> None:
    """With the rewards so far."""
    await run.submit('{"turns": 9}')
    async with served(Counting) as environment, working(run, environment, max_turns=2):
        (found,) = await run.ended(1)
    assert rewards_of(found)[("reward", "")] == 2.0


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (
            "reset",
            ENVIRONMENT,
            f"reset of task 't0' raised RuntimeError('no disk') at {HERE}",
        ),
        (
            "step",
            ENVIRONMENT,
            f"step 0 of task 't0' raised RuntimeError('no disk') at {HERE}",
        ),
        ("nan", ENVIRONMENT, "nan as reward 'reward'"),
        ("hang", TIMEOUT, "did not succeed within 0.3 s"),
    ],
)
async def test_a_failed_episode_is_no_reward_and_is_replaced(
    run: World, how: str, kind: int, words: str
) -> None:
    """The first attempt has a failure of its class, the second one the reward."""
    Fragile.num_resets.clear()
    await run.submit(f'{{"how": "{how}"}}')
    async with (
        served(Fragile) as environment,
        working(run, environment, step_timeout_seconds=0.3),
    ):
        first, second = await run.ended(2)
    assert not first.HasField("rewards")
    assert first.failure.failure_class == kind
    assert words in first.failure.message
    assert rewards_of(second) == {("reward", ""): 0.25}


async def test_a_late_episode_fails_by_its_own_deadline(run: World) -> None:
    """Although no call of it is late."""
    Fragile.num_resets.clear()
    await run.submit('{"how": "hang"}')
    async with (
        served(Fragile) as environment,
        working(run, environment, episode_timeout_seconds=0.5),
    ):
        first, _ = await run.ended(2)
    assert first.failure.failure_class == TIMEOUT
    assert first.failure.message == "the episode took over 0.5 s"


async def test_a_killed_environment_replaces_its_episodes(run: World) -> None:
    """SIGKILL in the middle of a step: no reward, and the next attempt gets one."""
    port = free_port()
    await run.submit("{}")
    with environment_process(port, stuck="1") as killed:
        async with working(run, f"127.0.0.1:{port}"):
            assert await asyncio.to_thread(next_line, killed) == "step"
            killed.kill()
            killed.wait()
            with environment_process(port):
                first, second = await run.ended(2)
    assert not first.HasField("rewards")
    assert first.failure.failure_class == INFRASTRUCTURE
    assert "episode" in first.failure.message
    assert rewards_of(second) == {("reward", ""): 0.25}


@contextmanager
def environment_process(port: int, stuck: str = "") -> Iterator[subprocess.Popen[str]]:
    """A server of `Stuck` in a process of its own, killed at the end."""
    name = "tests.lib.environments.stepped:Stuck"
    command = [sys.executable, "-m", "seamflow.environment", "--environment", name]
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "STUCK": stuck},
    )
    with process:
        try:
            assert "port" in next_line(process)
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    """Of its standard output."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def test_as_many_episodes_run_as_both_sides_allow(run: World) -> None:
    """Eight tasks of an evaluation: three at once, and one in the place that is for those alone."""
    Crowd.num_open = Crowd.most_open = 0
    Crowd.wanted = 4
    await run.submit(*["{}"] * 8)
    async with (
        served(Crowd, max_episodes=4) as environment,
        working(run, environment, max_episodes=3),
    ):
        found = await run.ended(8)
    assert all(rewards_of(each) == {("reward", ""): 1.0} for each in found)
    assert Crowd.most_open == 4


async def test_an_evaluation_has_places_of_its_own(run: World) -> None:
    """Episodes of training that wait, as for new weights, fill all others."""
    Crowd.num_open = Crowd.most_open = 0
    Crowd.wanted = 99
    await run.submit(*["{}"] * 8, purpose=Purpose.TRAIN)
    async with (
        served(Crowd, max_episodes=4) as environment,
        working(run, environment, max_episodes=2),
        asyncio.timeout(30),
    ):
        while Crowd.num_open < 2:
            await asyncio.sleep(0.01)
        await run.submit("{}", name="held-out")
        while Crowd.num_open < 3:
            await asyncio.sleep(0.01)
        rollouts = await run.started()
    assert [each.partition("/")[0] for each in sorted(rollouts)] == ["held-out0", "t0", "t1"]


async def test_two_processes_share_an_environment_and_wait_for_room(run: World) -> None:
    """A full environment fails nothing."""
    Crowd.num_open = Crowd.most_open = 0
    Crowd.wanted = 2
    await run.submit(*["{}"] * 8)
    async with (
        served(Crowd, max_episodes=2) as environment,
        working(run, environment),
        working(run, environment),
    ):
        found = await run.ended(8)
    assert [each for each in found if each.HasField("failure")] == []


@pytest.mark.parametrize(("per_task", "different"), [(False, 2), (True, 1)])
async def test_seeds_follow_task_and_place(run: World, per_task: bool, different: int) -> None:
    """The rollouts of a task differ, unless they share the seed."""
    Counting.seeds.clear()
    await run.submit('{"turns": 1}', num_samples=2)
    async with (
        served(Counting) as environment,
        working(run, environment, seed_per_task=per_task),
    ):
        await run.ended(2)
    assert len(Counting.seeds["t0"]) == 2
    assert len(set(Counting.seeds["t0"])) == different


async def test_a_self_driving_environment_gets_address_and_credential(run: World) -> None:
    """Names with slashes are quoted; its reward is the rollout's."""
    Drives.endpoints.clear()
    await run.submit("{}")
    async with (
        served(Drives) as environment,
        working(run, environment, http_gateway_url="http://h:1/"),
    ):
        (found,) = await run.ended(1)
    (endpoint,) = Drives.endpoints
    assert rewards_of(found) == {("reward", ""): 0.75}
    assert endpoint.base_url == "http://h:1/rollouts/t0%2F0%2F1/v1"
    assert endpoint.anthropic_base_url == "http://h:1/rollouts/t0%2F0%2F1"
    assert endpoint.rollout_id == found.rollout_id
    assert endpoint.credential


def test_a_replacement_has_the_seed_of_what_it_replaces() -> None:
    """Other places, tasks and settings have others."""
    seed = episode_seed(0, "t", "t/0/1")
    assert seed == episode_seed(0, "t", "t/0/2")
    others = [(0, "t", "t/1/1"), (0, "u", "u/0/1"), (1, "t", "t/0/1")]
    assert seed not in [episode_seed(*other) for other in others]
    assert episode_seed(0, "t", "t/0/1", per_task=True) == episode_seed(
        0, "t", "t/1/1", per_task=True
    )
    assert 0 <= seed < 2**63


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PreconditionError("x", "ENVIRONMENT_FAILED", metadata={}), ENVIRONMENT),
        (
            PreconditionError("x", "ENVIRONMENT_FAILED", metadata={"failure_class": "TIMEOUT"}),
            TIMEOUT,
        ),
        (
            PreconditionError("x", "ENVIRONMENT_FAILED", metadata={"failure_class": "POLICY"}),
            ENVIRONMENT,
        ),
        (DeadlineError("late"), TIMEOUT),
        (TimeoutError(), TIMEOUT),
        (InvalidRequestError("rewards"), ENVIRONMENT),
        (NotFoundError("episode"), INFRASTRUCTURE),
        (UnavailableError("gone"), INFRASTRUCTURE),
    ],
)
def test_each_failure_has_its_class(error: Exception, expected: int) -> None:
    """POLICY is never one: only rewards tell of the policy."""
    assert failure_class(error) == expected
