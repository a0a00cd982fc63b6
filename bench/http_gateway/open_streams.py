"""Memory of streams that are open at the same time, in the middle of their turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import psutil
from seamflow.channel import connect
from seamflow.client import Rollout
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.stubs import async_stub

from bench.http_gateway.calls import body, rollout_call
from bench.http_gateway.world import World

STEP_SECONDS = 0.1
STREAM_INTERVAL = 8
_TOKENS = 128
_WARM_STREAMS = 10
_WAIT_SECONDS = 90.0


@dataclass(slots=True)
class _Stream:
    """A streamed reply, as far as it has come."""

    keep_alives: int = 0
    events: int = 0
    num_tokens: int = 0
    """As its usage says, near its end."""
    is_complete: bool = False

    async def read(self, world: World, rollout: Rollout) -> None:
        """Request it, and read it to its end."""
        url, headers = rollout_call(world, rollout)
        request = {**body(True, _TOKENS), "stream_options": {"include_usage": True}}
        async with world.http.post(url, json=request, headers=headers) as response:
            async for line in response.content:
                self.keep_alives += line == b": keep-alive\n"
                if line.startswith(b"data: {"):
                    self.events += 1
                    usage = json.loads(line[len(b"data: ") :]).get("usage") or {}
                    self.num_tokens = usage.get("completion_tokens", 0)
                self.is_complete = line == b"data: [DONE]\n" or (self.is_complete and line == b"\n")


async def measure(
    world: World, raw: dict[str, list[float]], rounds: int, number: int
) -> dict[str, float]:
    """Figures of rounds with `number` streams each, every round in a new HTTP gateway."""
    each, complete = list[float](), list[float]()
    for _ in range(rounds):
        grown, streams = await _round(world, number)
        each.append(grown / number / 1e3)
        complete.append(sum(s.is_complete and s.num_tokens == _TOKENS for s in streams))
    raw |= {"open_streams.kb_each": each, "open_streams.complete": complete}
    return {
        "open_streams.number": number,
        "open_streams.kb_each": median(each),
        "open_streams.complete": min(complete),
    }


async def _round(world: World, number: int) -> tuple[float, list[_Stream]]:
    """Bytes that the HTTP gateway grew by, and the streams after their end."""
    world.http_gateway.stop()
    world.http_gateway.start()
    world.http_gateway.wait()
    rollouts = await world.rollouts(number)
    await asyncio.gather(*(_Stream().read(world, each) for each in rollouts[:_WARM_STREAMS]))
    process = psutil.Process(world.http_gateway.pid)
    before = process.memory_info().rss
    streams = [_Stream() for _ in rollouts]
    async with connect(world.engine.address) as channel, asyncio.TaskGroup() as reading:
        engine = async_stub(RolloutServerServiceStub, channel)
        for stream, rollout in zip(streams, rollouts, strict=True):
            reading.create_task(stream.read(world, rollout))
        # The first event has the role alone, the second one tokens.
        await _until(streams, lambda stream: stream.events >= 2)
        await engine.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_RETRACT))
        for stream in streams:
            stream.keep_alives = 0
        await _until(streams, lambda stream: stream.keep_alives > 0)
        grown = process.memory_info().rss - before
        if any(stream.is_complete for stream in streams):
            raise RuntimeError(f"streams of {_TOKENS} tokens have ended before all were open")
        await engine.Resume(pb.ResumeRequest())
    return grown, streams


async def _until(streams: Sequence[_Stream], holds: Callable[[_Stream], bool]) -> None:
    """Raises `TimeoutError` if it does not hold of each stream in time."""
    async with asyncio.timeout(_WAIT_SECONDS):
        while not all(map(holds, streams)):
            await asyncio.sleep(0.05)
