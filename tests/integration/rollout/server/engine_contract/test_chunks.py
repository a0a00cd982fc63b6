"""With a chunk interval tokens come in few chunks, and never after a pause or the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rollout.server.engines.engine import Chunk, Engine, EngineRequest, PauseMode
from tests.integration.rollout.server.engine_contract.engines import wanted
from tests.lib.rollout.server.support import settle

UNWATCHED = 3600.0


async def read(engine: Engine, request: EngineRequest, into: list[Chunk]) -> list[Chunk]:
    """All chunks of a sequence."""
    async for chunk in engine.generate(request):
        into.append(chunk)  # noqa: PERF401 -- looked at while it grows
    return into


def ids(chunks: list[Chunk]) -> list[int]:
    """All their tokens."""
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


@pytest.fixture
def keeps_back(engine: Engine) -> Engine:
    """An engine whose chunks are its own to make."""
    if engine.info.name == "sglang":
        pytest.skip("chunks come as SGLang sends them")
    return engine


async def test_a_sequence_that_nobody_watches_is_one_chunk(keeps_back: Engine) -> None:
    """The same tokens as in many; the control: watched, it is many."""
    request = wanted(keeps_back, max_new_tokens=100)
    watched = await read(keeps_back, request, [])
    (whole,) = await read(keeps_back, replace(request, chunk_seconds=UNWATCHED), [])
    assert list(whole.token_ids) == ids(watched)
    assert len(watched) > 10


async def test_tokens_are_kept_back_for_so_long_only(keeps_back: Engine) -> None:
    """An interval that is over with every step keeps nothing back but the first token."""
    request = wanted(keeps_back, max_new_tokens=100)
    watched = await read(keeps_back, request, [])
    chunks = await read(keeps_back, replace(request, chunk_seconds=1e-9), [])
    assert ids(chunks) == ids(watched)
    assert len(chunks) > 10


async def test_a_pause_hands_out_what_was_kept_back(keeps_back: Engine) -> None:
    """When `pause` returns; a server may be given other weights then, or be gone."""
    request = replace(wanted(keeps_back, max_new_tokens=300), chunk_seconds=UNWATCHED)
    kept: list[Chunk] = []
    reader = asyncio.create_task(read(keeps_back, request, kept))
    while not keeps_back.load().running + keeps_back.load().queued:
        await settle()
    # It comes after that one and is sampled beside it: when it has ended, both have tokens.
    async for _ in keeps_back.generate(wanted(keeps_back, max_new_tokens=8)):
        pass
    assert kept == []
    await keeps_back.pause(PauseMode.RETRACT)
    await settle()
    assert len(kept) == 1
    assert 0 < len(ids(kept)) < 300
    await keeps_back.resume()
    await reader
    assert len(kept) == 2
    assert len(ids(kept)) == 300
