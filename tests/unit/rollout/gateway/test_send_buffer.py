"""The send buffer: order, merging and heartbeats."""

from __future__ import annotations

import asyncio

import pytest
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.send_buffer import SendBuffer
from tests.lib.rollout.gateway.support import sampled


def chunk(offset: int, ids: list[int]) -> pb.TokenChunk:
    """Sampled tokens."""
    sent = pb.TokenChunk(offset=offset, text="a" * len(ids))
    sent.tokens.MergeFromString(sampled(ids).SerializeToString())
    return sent


FINISH = pb.TurnEnd(raw_text="end")


async def test_chunks_that_wait_become_one() -> None:
    """Nothing is lost, and what waits is no more than the tokens."""
    buffer = SendBuffer(60.0)

    async def turn() -> None:
        for start in range(0, 100, 2):
            buffer.put(chunk(start, [start, start + 1]))
        buffer.put(FINISH)

    events = [event async for event in buffer.events(turn())]
    assert [event.WhichOneof("event") for event in events] == ["chunk", "end"]
    merged = events[0].chunk
    assert (merged.offset, list(merged.tokens.token_ids)) == (0, list(range(100)))
    assert len(merged.tokens.logprobs) == len(merged.text) == 100
    assert [span.start for span in merged.tokens.spans] == list(range(0, 100, 2))


async def test_parsed_texts_of_chunks_that_wait_are_joined() -> None:
    """In order, content and reasoning apart."""
    buffer = SendBuffer(60.0)

    async def turn() -> None:
        for number in range(3):
            sent = chunk(number, [number])
            sent.content_delta, sent.reasoning_delta = str(number), str(-number)
            buffer.put(sent)

    (event,) = [event async for event in buffer.events(turn())]
    assert (event.chunk.content_delta, event.chunk.reasoning_delta) == ("012", "0-1-2")


async def test_an_agent_that_reads_gets_chunks_as_they_come() -> None:
    """Control of the merging: one by one, none of them held back."""
    buffer, read = SendBuffer(60.0), asyncio.Queue[None]()

    async def turn() -> None:
        for start in range(3):
            buffer.put(chunk(start, [start]))
            await read.get()

    seen = []
    async for event in buffer.events(turn()):
        seen.append(list(event.chunk.tokens.token_ids))
        read.put_nowait(None)
    assert seen == [[0], [1], [2]]


async def test_silence_is_broken() -> None:
    """By heartbeats, until there is an event."""
    buffer, heard = SendBuffer(0.005), asyncio.Event()

    async def turn() -> None:
        await heard.wait()
        buffer.put(FINISH)

    seen = []
    async for event in buffer.events(turn()):
        seen.append(event.WhichOneof("event"))
        if len(seen) == 3:
            heard.set()
    assert seen[:3] == ["heartbeat"] * 3
    assert seen[-1] == "end"


async def test_a_failure_comes_after_what_was_put_before() -> None:
    """The agent keeps what is recorded."""
    buffer = SendBuffer(60.0)

    async def turn() -> None:
        buffer.put(chunk(0, [1]))
        raise ValueError("lost")

    events = buffer.events(turn())
    assert (await anext(events)).HasField("chunk")
    with pytest.raises(ValueError, match="lost"):
        await anext(events)


async def test_an_agent_that_goes_away_ends_the_turn() -> None:
    """Before the iteration is closed, so that no server works on."""
    buffer, ended = SendBuffer(60.0), False

    async def turn() -> None:
        nonlocal ended
        buffer.put(chunk(0, [1]))
        try:
            await asyncio.Event().wait()
        finally:
            ended = True

    events = buffer.events(turn())
    await anext(events)
    await events.aclose()
    assert ended
