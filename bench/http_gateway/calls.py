"""The same call of the model through the Python SDK and through HTTP.

Each returns the seconds to its first tokens, or to all of them where they come at once, and raises
`RuntimeError` for an incomplete reply.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from seamflow.client import Rollout
from seamflow.common.v1.tokens_pb2 import SamplingParams

from bench.http_gateway.world import World

Call = Callable[[World, Rollout, bool], Awaitable[float]]
"""A call in a rollout; True: streamed."""

NUM_TOKENS = 51
"""Of a reply; each is a chunk of its own in a stream."""
_MESSAGES = [{"role": "user", "content": "0123456789" * 10}]
_CHUNK_SECONDS = 1.0
"""Of a turn that is not streamed, as the HTTP gateway requests it."""


def body(stream: bool, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """The request for a chat completion."""
    return {
        "model": "policy",
        "messages": _MESSAGES,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": stream,
    }


def rollout_call(world: World, rollout: Rollout) -> tuple[str, dict[str, str]]:
    """URL and headers of a chat completion in a rollout."""
    url = f"{world.url}/rollouts/{rollout.rollout_id}/v1/chat/completions"
    return url, {"authorization": f"Bearer {rollout.credential}"}


async def by_grpc(world: World, rollout: Rollout, stream: bool) -> float:
    """Through the Python SDK."""
    began = time.perf_counter()
    turn = rollout.stream(
        _MESSAGES,
        SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True),
        chunk_seconds=0.0 if stream else _CHUNK_SECONDS,
        stream_text=stream,
    )
    first, num_chunks = 0.0, 0
    async for _ in turn:
        first = first or time.perf_counter() - began
        num_chunks += 1
    _check("tokens", len(turn.turn.token_ids), NUM_TOKENS)
    if stream:
        _check("chunks", num_chunks, NUM_TOKENS)
    return first


async def by_http(world: World, rollout: Rollout, stream: bool) -> float:
    """As a chat completion of the HTTP gateway."""
    url, headers = rollout_call(world, rollout)
    return await post(world.http, url, headers, stream)


async def post(
    http: aiohttp.ClientSession, url: str, headers: Mapping[str, str], stream: bool
) -> float:
    """As a chat completion of any server."""
    began = time.perf_counter()
    async with http.post(url, json=body(stream), headers=headers) as response:
        _check("status", response.status, 200)
        if not stream:
            reply = json.loads(await response.read())
            _check("tokens", reply["usage"]["completion_tokens"], NUM_TOKENS)
            return time.perf_counter() - began
        first, events = 0.0, list[bytes]()
        async for line in response.content:
            if line.startswith(b"data:"):
                events.append(line)
            if len(events) == 2:  # the first has the role alone
                first = first or time.perf_counter() - began
    _check("events", len(events), 1 + NUM_TOKENS + 2)
    _check("last event", events[-1], b"data: [DONE]\n")
    return first


async def echoed(http: aiohttp.ClientSession, url: str) -> None:
    """The same request to a server that answers with it."""
    async with http.post(url, json=body(False)) as response:
        _check("echo", json.loads(await response.read()), body(False))


def _check(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise RuntimeError(f"{what} of a reply: {found!r} instead of {expected!r}")
