"""Every engine pauses at a token boundary and resumes without a trace in the tokens."""

from __future__ import annotations

import asyncio

import pytest

from rollout.server.engines.engine import Engine, FinishReason, PauseMode
from tests.integration.rollout.server.engine_contract.engines import wanted
from tests.lib.rollout.server.support import Output, collect, interrupted, settle


async def test_retracting_pause_changes_nothing_but_time(engine: Engine) -> None:
    """A sequence paused and resumed several times gives the tokens of an undisturbed one."""
    turn = wanted(engine, max_new_tokens=200)
    expected = await collect(engine.generate(turn))
    output, pauses = await interrupted(engine, turn, PauseMode.RETRACT, times=3)
    assert pauses == 3
    assert output.token_ids == expected.token_ids
    assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


async def test_nothing_is_sampled_during_a_pause(engine: Engine) -> None:
    """When `pause` returns every token has been handed out, and no more come until `resume`."""
    output = Output()
    reader = asyncio.create_task(
        collect(engine.generate(wanted(engine, max_new_tokens=300)), output)
    )
    while not output.token_ids:
        await settle()
    await engine.pause(PauseMode.RETRACT)
    await settle()
    handed_out = len(output.token_ids)
    assert engine.load().running == 0
    assert engine.load().queued == 1
    waiting = asyncio.create_task(collect(engine.generate(wanted(engine))))
    await engine.pause(PauseMode.RETRACT)
    await settle()
    assert len(output.token_ids) == handed_out
    assert not waiting.done()
    await engine.resume()
    await reader
    assert len(output.token_ids) == 300
    assert len((await waiting).token_ids) == 32


async def test_aborting_pause_gives_sequences_up_with_what_they_have(engine: Engine) -> None:
    """An aborted sequence ends INTERRUPTED; continuing it gives what it would have given."""
    turn = wanted(engine, max_new_tokens=200)
    expected = await collect(engine.generate(turn))
    output, pauses = await interrupted(engine, turn, PauseMode.ABORT, times=1)
    assert pauses == 1
    assert output.finish is FinishReason.INTERRUPTED
    assert 0 < len(output.token_ids) < 200
    rest = await collect(
        engine.generate(
            wanted(engine, (3, 4, 5, *output.token_ids), max_new_tokens=200 - len(output.token_ids))
        )
    )
    assert output.token_ids + rest.token_ids == expected.token_ids


async def test_requests_during_an_aborting_pause_end_at_once(engine: Engine) -> None:
    """A request during an aborting pause ends immediately."""
    await engine.pause(PauseMode.ABORT)
    output = await collect(engine.generate(wanted(engine)))
    assert output.finish is FinishReason.INTERRUPTED
    assert output.token_ids == []
    await engine.resume()
    assert len((await collect(engine.generate(wanted(engine)))).token_ids) == 32


async def test_pause_in_place_goes_on_where_it_stopped(engine: Engine) -> None:
    """Held in place, a sequence gives the tokens of an undisturbed one."""
    if "pause_in_place" not in engine.info.features:
        pytest.skip("the engine cannot pause in place")
    turn = wanted(engine, max_new_tokens=200)
    expected = await collect(engine.generate(turn))
    output, pauses = await interrupted(engine, turn, PauseMode.IN_PLACE, times=3)
    assert pauses == 3
    assert output.token_ids == expected.token_ids
