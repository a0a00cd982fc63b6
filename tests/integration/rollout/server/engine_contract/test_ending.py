"""Every engine ends its turns when it closes, and reports its failure."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.server.engines import build_engine
from rollout.server.engines.engine import Engine, EngineFailed, FinishReason, PauseMode
from rollout.server.engines.fake import FakeEngine
from rollout.server.engines.sglang.sglang_engine import SGLangEngine
from tests.integration.rollout.server.engine_contract.engines import (
    INTERVAL,
    KINDS,
    SGLANG_CONTEXT,
    SLOTS,
    make_engine,
    wanted,
)
from tests.lib.rollout.server import sglang_server
from tests.lib.rollout.server.support import Output, collect


async def test_closing_the_engine_ends_open_sequences(
    engine: Engine,
) -> None:
    """Open sequences end INTERRUPTED when the engine closes, so they can continue elsewhere."""
    output = Output()
    async for chunk in engine.generate(wanted(engine, max_new_tokens=300)):
        if not output.token_ids:
            await engine.close()
        output.add(chunk)
    assert output.finish is FinishReason.INTERRUPTED


async def dies(engine: Engine, newer: Path, end: Callable[[], None], why: str) -> None:
    """A turn in flight and every later call raise why; a new start is version 0 again."""
    before = await collect(engine.generate(wanted(engine)))
    await engine.pause(PauseMode.RETRACT)
    await engine.update_weights(newer, 3)
    await engine.resume()
    turn = engine.generate(wanted(engine, max_new_tokens=300))
    await anext(turn)
    end()
    # In this order: an engine that was killed is known to be dead once a turn has found out.
    for raises in (collect(turn), engine.wait_failed(), collect(engine.generate(wanted(engine)))):
        with pytest.raises(EngineFailed, match=why):
            await raises
    if "restart" in engine.info.features:
        await engine.start()
        assert engine.weight_version == 0
        assert (await collect(engine.generate(wanted(engine)))).token_ids == before.token_ids


async def test_engine_that_is_given_up_counts_as_dead(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    """The first reason stays."""

    def give_up() -> None:
        engine.fail("it hangs")
        engine.fail("it still hangs")

    await dies(engine, folders[1], give_up, "it hangs")


def _mortal_sglang(folder: Path) -> Engine:
    return build_engine(
        sglang_server.sglang_config(
            folder, max_running=SLOTS, max_context=SGLANG_CONTEXT, stream_interval=INTERVAL
        )
    )


async def _broken() -> None:
    raise RuntimeError("the device fell off the bus")


def _kill(engine: Any) -> None:
    if isinstance(engine, FakeEngine):
        engine._step = _broken
    elif isinstance(engine, SGLangEngine):
        assert engine._life.process is not None
        os.killpg(engine._life.process._process.pid, signal.SIGKILL)
    else:
        engine._mailbox.post(lambda: asyncio.run(_broken()))


@pytest.mark.parametrize("kind", KINDS)
async def test_dead_engine_fails_its_turns_and_may_start_again(
    kind: str, folders: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    """Killed from outside: all waiting callers get the failure."""
    own = _mortal_sglang(folders[0]) if kind == "sglang" else make_engine(kind, folders[0], request)
    await own.start()
    try:
        words = "SGLang" if kind == "sglang" else "fell off the bus"
        await dies(own, folders[1], lambda: _kill(own), words)
    finally:
        await own.close()
