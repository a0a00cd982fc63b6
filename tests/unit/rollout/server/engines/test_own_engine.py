"""The engine that docs/rollout.md shows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollout.server.engines.engine import Engine, EngineFailed, FinishReason, PauseMode
from tests.lib.page_code import run_page
from tests.lib.rollout.server.support import collect, interrupted, request, settle


@pytest.fixture
async def engine() -> Engine:
    """The engine of the page, started."""
    made: Engine = run_page("rollout.md", "An engine of your own")["Counting"](None)
    await made.start()
    return made


async def test_the_pages_engine_counts_across_pauses(engine: Engine) -> None:
    """It goes on after a pause, stops at its end of sequence, and gives up what is aborted."""
    paused, pauses = await interrupted(engine, request((3, 4)), PauseMode.RETRACT, times=3)
    assert pauses == 3
    assert paused.token_ids == list(range(5, 5 + len(paused.token_ids)))
    assert paused.finish is FinishReason.LENGTH
    assert (await collect(engine.generate(request((98,))))).token_ids == [99, 0]
    aborted, _ = await interrupted(engine, request((3, 4)), PauseMode.ABORT, times=1)
    assert (aborted.token_ids, aborted.finish) == ([5], FinishReason.INTERRUPTED)


async def test_the_pages_engine_swaps_weights(engine: Engine, tmp_path: Path) -> None:
    """Nothing is sampled during a pause; afterwards each token has the new version."""
    await engine.pause(PauseMode.RETRACT)
    waiting = asyncio.create_task(collect(engine.generate(request((3,)))))
    await settle()
    assert engine.load().running == 1
    assert not waiting.done()
    await engine.update_weights(tmp_path, 7)
    await engine.resume()
    assert set((await waiting).versions) == {7}


async def test_the_pages_engine_says_that_it_failed(engine: Engine) -> None:
    """To whoever waits for tokens or for a failure."""
    engine.fail("tried")
    for raises in (collect(engine.generate(request((3,)))), engine.wait_failed()):
        with pytest.raises(EngineFailed, match="tried"):
            await raises
