"""The setting `dispatch` decides which server a turn of the real gateway gets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rollout.gateway.dispatch.policies import Candidate, LeastLoad, TurnRequest
from tests.integration.rollout.gateway.test_gateway import agent, ids_of
from tests.lib.rollout.gateway.support import ScriptedServer, scripted

NUM_TURNS = 3


class FirstByName(LeastLoad):
    """Always the server whose id sorts first."""

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate:
        """By server id."""
        return min(candidates, key=lambda c: c.server_id)


class LastByName(LeastLoad):
    """Always the server whose id sorts last."""

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate:
        """By server id."""
        return max(candidates, key=lambda c: c.server_id)


@pytest.mark.parametrize(("policy", "chosen"), [(FirstByName, "a"), (LastByName, "b")])
async def test_turns_go_where_the_configured_policy_sends_them(
    tmp_path: Path, policy: type[LeastLoad], chosen: str
) -> None:
    """Two idle servers; no fixed policy satisfies both parameters."""
    servers = {name: ScriptedServer(name) for name in "ab"}
    async with AsyncExitStack() as stack:
        addresses = []
        for server in servers.values():
            server.answers = [[[7, 8]] for _ in range(NUM_TURNS)]
            addresses.append(await stack.enter_async_context(scripted(server)))
        dispatch = f"{__name__}:{policy.__name__}"
        one = await stack.enter_async_context(agent(tmp_path, *addresses, dispatch=dispatch))
        for server in servers.values():
            await server.known()
        for number in range(NUM_TURNS):
            assert await ids_of(one.generate(f"turn-{number}")) == [7, 8]
    num_turns = {name: len(server.prompts) for name, server in servers.items()}
    assert num_turns == {"a": 0, "b": 0, chosen: NUM_TURNS}
