"""Equal calls at the same time, and calls repeated by SDKs: who gets which turn.

Against gateways in this process and a scripted rollout server, whose answers all differ, as those
of a policy at temperature 1 do; but no two are alike by chance.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.lib.rollout.http_gateway.support import World, world

CHAT: Any = {
    "model": "policy",
    "messages": [{"role": "user", "content": "say"}],
    "max_tokens": 64,
    "stream": False,
}
OTHER: Any = {**CHAT, "messages": [{"role": "user", "content": "something else"}]}
LIMIT = 16
"""Calls of one rollout at a time; further ones get status 429."""


async def figures(num_calls: int, num_repeated: int) -> dict[str, float]:
    """Both parts, each in a world of its own."""
    with tempfile.TemporaryDirectory() as folder:
        async with world(Path(folder), max_calls_per_rollout=LIMIT) as gateway:
            found = await equal_calls(gateway, num_calls)
    with tempfile.TemporaryDirectory() as folder:
        async with world(Path(folder), max_calls_per_rollout=1, hold_seconds=0.0) as gateway:
            return found | await repeated_calls(gateway, num_repeated)


async def equal_calls(gateway: World, number: int) -> dict[str, float]:
    """Parallel calls of one content, more than the gateway takes at once; the SDK repeats the rest.

    `copies`: answers that another call got, too; `not_received`: recorded turns that none got.
    """
    gateway.say(*(f"answer {index}" for index in range(number)))
    gateway.server.may_answer.clear()
    async with gateway.openai(max_retries=1_000) as client:
        calls = [
            asyncio.ensure_future(client.chat.completions.create(**CHAT)) for _ in range(number)
        ]
        while len(await gateway.recorded()) < LIMIT:
            await asyncio.sleep(0.01)
        gateway.server.may_answer.set()
        replies: list[Any] = await asyncio.gather(*calls)
    names = {reply.id for reply in replies}
    texts = {reply.choices[0].message.content for reply in replies}
    recorded = await gateway.recorded()
    return {
        "equal_calls": number,
        "different_samples": len(texts),
        "copies": number - len(names),
        "not_received": len(recorded) - len(names),
    }


async def repeated_calls(gateway: World, number: int) -> dict[str, float]:
    """Calls of one content, one after the other, whose first try has failed in turn in each way.

    `repeated_right`: those whose repeated call got the turn that the call itself had begun, and for
    which no other turn is recorded.
    """
    letter = gateway.template.encode_text("a")
    gateway.server.default_answer = [letter, [*letter, *gateway.template.stop_token_ids]]
    right = 0
    for index in range(number):
        right += await _FAILURES[index % len(_FAILURES)](gateway)
    return {"repeated_calls": number, "repeated_right": right}


async def _cut(gateway: World, retry: int = 0) -> bool:
    """The connection breaks while the turn is sampled."""
    async with _held(gateway, gateway.server.may_answer, CHAT, retry) as begun:
        pass
    return await _gets(gateway, begun, retry + 1)


async def _late(gateway: World) -> bool:
    """The client gives up when it has a part of the answer."""
    gateway.server.may_end.clear()
    async with aiohttp.ClientSession() as session:
        reply = await _post(session, gateway, {**CHAT, "stream": True}, 0)
        await reply.content.readany()
        begun = list(await gateway.recorded())
        reply.close()
    gateway.server.may_end.set()
    return await _gets(gateway, begun, 1, stream=True)


async def _refused(gateway: World) -> bool:
    """The first try gets status 429; then the second one is cut."""
    async with (
        _held(gateway, gateway.server.may_answer, OTHER, 0),
        aiohttp.ClientSession() as session,
    ):
        reply = await _post(session, gateway, CHAT, 0)
        assert reply.status == 429
    return await _cut(gateway, 1)


_FAILURES: tuple[Callable[[World], Awaitable[bool]], ...] = (_cut, _late, _refused)


@asynccontextmanager
async def _held(
    gateway: World, gate: asyncio.Event, body: Any, retry: int
) -> AsyncIterator[list[str]]:
    """A call that waits for `gate` and is cut at the end; the turns that are recorded then."""
    gate.clear()
    asked = len(gateway.server.prompts)
    begun: list[str] = []
    async with aiohttp.ClientSession() as session:
        call = asyncio.ensure_future(_post(session, gateway, body, retry))
        while len(gateway.server.prompts) == asked:
            await asyncio.sleep(0.005)
            if call.done():  # the call before has not been given up yet
                call = asyncio.ensure_future(_post(session, gateway, body, retry))
        yield begun
        begun += await gateway.recorded()
        call.cancel()
    gate.set()


async def _gets(gateway: World, begun: list[str], retry: int, *, stream: bool = False) -> bool:
    """Whether the repeated call gets the last of the turns that had begun, and begins none."""
    status = 429
    async with aiohttp.ClientSession() as session:
        while status == 429:  # the call before has not been given up yet
            reply = await _post(session, gateway, {**CHAT, "stream": stream}, retry)
            status = reply.status
            await reply.read()
    recorded = list(await gateway.recorded())
    return reply.headers["seamflow-turn-id"] == begun[-1] and recorded == begun


async def _post(
    session: aiohttp.ClientSession, gateway: World, body: Any, retry: int
) -> aiohttp.ClientResponse:
    url = f"{gateway.rollout['base_url']}/chat/completions"
    headers = {"authorization": f"Bearer {gateway.rollout['credential']}"}
    headers["x-stainless-retry-count"] = str(retry)
    return await session.post(url, json=body, headers=headers)
