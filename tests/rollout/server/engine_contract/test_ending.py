"""Every engine ends its turns when it ends, and tells when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rollout.server.engine import Engine, EngineFailed, FinishReason, PauseMode
from rollout.server.engines import build_engine
from rollout.server.engines.fake import FakeEngine
from rollout.server.engines.sglang import SGLangEngine
from tests.rollout.server import sglang_server
from tests.rollout.server.engine_contract.engines import (
    INTERVAL,
    KINDS,
    SGLANG_CONTEXT,
    SLOTS,
    make_engine,
    wanted,
)
from tests.rollout.server.support import Output, collect


async def test_closing_the_engine_ends_open_sequences(
    engine: Engine,
) -> None:
    """Open sequences end INTERRUPTED when the engine closes, so they can go on elsewhere."""
    output = Output()
    async for chunk in engine.generate(wanted(engine, max_new_tokens=300)):
        if not output.token_ids:
            await engine.close()
        output.add(chunk)
    assert output.finish is FinishReason.INTERRUPTED


async def test_engine_that_is_given_up_counts_as_dead(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    """Turns and `wait_failed` raise why; the first reason stays; where it can, it starts anew."""
    before = await collect(engine.generate(wanted(engine)))
    await engine.pause(PauseMode.RETRACT)
    await engine.update_weights(folders[1], 3)
    await engine.resume()
    turn = engine.generate(wanted(engine, max_new_tokens=300))
    await anext(turn)
    engine.fail("it hangs")
    engine.fail("it still hangs")
    for raises in (collect(turn), collect(engine.generate(wanted(engine))), engine.wait_failed()):
        with pytest.raises(EngineFailed, match="it hangs"):
            await raises
    if "restart" in engine.info.features:
        await engine.start()
        assert engine.weight_version == 0
        assert (await collect(engine.generate(wanted(engine)))).token_ids == before.token_ids


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
    """A turn in flight and every later call raise EngineFailed; a new start is version 0 again."""
    own = _mortal_sglang(folders[0]) if kind == "sglang" else make_engine(kind, folders[0], request)
    await own.start()
    try:
        before = await collect(own.generate(wanted(own)))
        await own.pause(PauseMode.RETRACT)
        await own.update_weights(folders[1], 3)
        await own.resume()
        turn = own.generate(wanted(own, max_new_tokens=300))
        await anext(turn)
        _kill(own)
        with pytest.raises(EngineFailed):
            await collect(turn)
        with pytest.raises(EngineFailed):
            await own.wait_failed()
        with pytest.raises(EngineFailed):
            await collect(own.generate(wanted(own)))
        if "restart" in own.info.features:
            await own.start()
            assert own.weight_version == 0
            assert (await collect(own.generate(wanted(own)))).token_ids == before.token_ids
    finally:
        await own.close()
