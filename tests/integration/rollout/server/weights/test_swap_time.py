"""When servers change over to new weights: at the next token, or when turns have ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout.server.engine_lifecycle import RunningTurns
from tests.lib.rollout.server.client import expected_tokens, fake_config, read, serving
from tests.lib.rollout.server.support import settle
from tests.lib.rollout.server.weights.weight_service import TinyWeightService


async def test_a_turn_boundary_waits_for_the_turns_that_run_and_no_others() -> None:
    """Turns that begin during the wait are not waited for: they would never all have ended."""
    turns = RunningTurns()
    reached = asyncio.Event()

    async def change() -> None:
        await turns.ended(60)
        reached.set()

    with turns.running():
        changing = asyncio.create_task(change())
        await settle()
        later = turns.running()
        later.__enter__()
        assert not reached.is_set()
    await asyncio.wait_for(changing, 10)
    later.__exit__(None, None, None)


async def test_a_turn_that_does_not_end_is_not_waited_for_longer_than_told() -> None:
    """The deadline of the wait holds."""
    turns = RunningTurns()
    with turns.running():
        async with asyncio.timeout(10):
            await turns.ended(0.05)


@pytest.mark.parametrize(
    ("settings", "mixed"),
    [({"weight_update_at": "turn"}, False), ({"weight_update_at": "token"}, True)],
)
async def test_a_turn_ends_under_the_weights_it_began_with(
    tmp_path: Path, settings: dict[str, Any], mixed: bool
) -> None:
    """`turn` keeps a running turn whole, the next has the new weights; `token` cuts through."""
    weights = TinyWeightService()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "model.safetensors").write_bytes(b"1")
    async with weights.serving() as port:
        config = fake_config(weights=f"127.0.0.1:{port}", fake_step_seconds=0.002, **settings)
        async with serving(config) as client:
            await client.serving(0)
            turn = asyncio.create_task(read(client.generate(max_new_tokens=400)))
            await client.until(lambda info: info.num_running == 1)
            await weights.publish(1, tmp_path / "one")
            token_ids, versions, _ = await turn
            await client.serving(1)
            assert (await read(client.generate()))[1] == [1] * 32
    assert (set(versions) == {0, 1}) == mixed
    assert token_ids == expected_tokens((3, 4, 5), versions)
