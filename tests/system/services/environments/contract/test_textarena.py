"""What only TextArena has: opponents, rewards at the end, illegal moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from seamflow.environment import EnvironmentClient, Step, Task
from seamflow.errors import PreconditionError

from tests.lib.environments.contract.case import Case
from tests.lib.environments.contract.cases import TEXTARENA
from tests.lib.environments.contract.checks import connected, contents, named

TASK = Task(task_id="t", payload={})
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(TEXTARENA.cannot_run()), reason=TEXTARENA.cannot_run()),
]


def against(opponent: str, **arguments: object) -> Case:
    """Tic-tac-toe against a function of `opponents`."""
    name = f"tests.lib.environments.contract.opponents:{opponent}"
    return replace(TEXTARENA, arguments={**TEXTARENA.arguments, "opponent": name, **arguments})


async def played(client: EnvironmentClient, *moves: str) -> list[Step]:
    """The answers to the moves of a game."""
    async with await client.reset(TASK, 1) as episode:
        return [await episode.step({"role": "assistant", "content": move}) for move in moves]


async def test_rewards_come_at_the_end() -> None:
    """A won game, and one that an illegal move, made twice, has lost."""
    async with connected(against("first_free")) as client:
        won = await played(client, "[4]", "[3]", "[5]")
        assert [named(step)["reward"] for step in won] == [0, 0, 1]
        assert [step.done for step in won] == [False, False, True]
        illegal = await played(client, "[99]", "[99]")
        assert named(illegal[-1])["reward"] == -1
        assert illegal[-1].policy_failure.startswith("illegal move")


async def test_only_what_is_new_is_told() -> None:
    """The rules stand in the first message alone."""
    async with connected(against("first_free")) as client:
        (step,) = await played(client, "[4]")
    assert "Your goal" not in contents(step)[0]
    assert "Available Moves" in contents(step)[0]


async def test_the_policy_may_be_the_second_player() -> None:
    """The opponent has moved before the first message."""
    async with (
        connected(against("first_free", player=1)) as client,
        await client.reset(TASK, 1) as episode,
    ):
        (message,) = episode.observation.messages
    assert "Player 0 placed" in message["content"]


async def test_an_illegal_move_of_the_opponent_is_a_failure_of_the_environment() -> None:
    """No victory of the policy."""
    async with connected(against("cheats")) as client:
        with pytest.raises(PreconditionError, match="the opponent made an illegal move") as raised:
            await played(client, "[4]")
    assert raised.value.metadata["failure_class"] == "ENVIRONMENT"
