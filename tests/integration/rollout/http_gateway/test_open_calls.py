"""Calls stay open while a turn takes long, and a repeated call gets the turn of the first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.lib.rollout.http_gateway.support import World, http_gateway, world

ASK: Any = [{"role": "user", "content": "say"}]
CHAT = {"model": "policy", "messages": ASK, "max_tokens": 64}
RETRY = {"x-stainless-retry-count": "1"}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "say", "max_output_tokens": 64},
    "/v1/messages": CHAT,
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 64}},
}
SIGNS = {
    "/v1/chat/completions": b": keep-alive\n\n",
    "/v1/responses": b"event: response.in_progress\n",
    "/v1/messages": b"event: ping\n",
    "/inference/v1/generate": b": keep-alive\n\n",
}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[World]:
    """A gateway that holds nothing back for long."""
    async with world(tmp_path, hold_seconds=0.01, keep_alive_seconds=0.05) as found:
        yield found


def call(gateway: World, path: str, body: Any, **headers: str) -> Any:
    """A POST below the evaluation rollout; use it as a context."""
    url = gateway.rollout["anthropic_base_url"] + path
    given = {"authorization": f"Bearer {gateway.rollout['credential']}", **headers}
    return gateway.http.post(url, json=body, headers=given)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_whole_reply_is_preceded_by_white_space(gateway: World, path: str) -> None:
    """The status comes before the turn's end, and the body is still one JSON object."""
    gateway.say("hello")
    gateway.server.may_answer.clear()
    async with call(gateway, path, ROUTES[path]) as response:
        assert (response.status, gateway.server.num_answered) == (200, 0)
        assert await response.content.readexactly(3) == b"   "
        gateway.server.may_answer.set()
        reply = json.loads(await response.read())
    assert gateway.rollout["rollout_id"]
    assert reply["seamflow"]["turn_id"] == response.headers["seamflow-turn-id"]


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_is_kept_alive(gateway: World, path: str) -> None:
    """In the way of its dialect, before the first token."""
    gateway.say("hello")
    gateway.server.may_answer.clear()
    async with call(gateway, path, {**ROUTES[path], "stream": True}) as response:
        seen = b""
        while seen.count(SIGNS[path]) < 3:
            seen += await response.content.readany()
        assert gateway.server.num_answered == 0
        gateway.server.may_answer.set()
        seen += await response.read()
    assert b"".join(seen.split(SIGNS[path])).count(b"data: ") > 1


async def test_a_reply_is_held_back(tmp_path: Path) -> None:
    """Nothing is sent before `hold_seconds`: the client may repeat the call until then."""
    async with world(tmp_path, hold_seconds=300.0, keep_alive_seconds=0.01) as gateway:
        gateway.say("hello")
        gateway.server.may_answer.clear()
        request = asyncio.ensure_future(
            call(gateway, "/v1/chat/completions", {**CHAT, "stream": True}).__aenter__()
        )
        await gateway.server.asked.wait()
        _, pending = await asyncio.wait({request}, timeout=0.2)
        assert pending
        gateway.server.may_answer.set()
        async with await request as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_tokens_are_streamed_as_they_are_sampled(gateway: World) -> None:
    """The first chunk arrives while the turn still runs."""
    gateway.say("hello there")
    gateway.server.may_end.clear()
    body = {**CHAT, "stream": True, "return_token_ids": True}
    async with call(gateway, "/v1/chat/completions", body) as response:
        seen = b""
        while b"token_ids" not in seen:
            seen += await response.content.readany()
        gateway.server.may_end.set()
        seen += await response.read()
    assert seen.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept alive", "silent"])
async def test_a_call_outlives_the_patience_of_an_sdk(tmp_path: Path, is_kept: bool) -> None:
    """A turn that takes three times as long as the client waits for a byte."""
    hold = 0.05 if is_kept else 300.0
    async with world(tmp_path, hold_seconds=hold, keep_alive_seconds=0.05) as gateway:
        gateway.say("hello")
        gateway.server.may_answer.clear()
        async with gateway.openai(timeout=0.5, max_retries=0) as client:
            reply = asyncio.ensure_future(client.chat.completions.create(**CHAT))
            await asyncio.wait({reply}, timeout=1.5)
            gateway.server.may_answer.set()
            if is_kept:
                assert (await reply).choices[0].message.content == "hello"
            else:
                with pytest.raises(openai.APITimeoutError):
                    await reply


async def test_an_sdk_repeats_a_call_that_timed_out(tmp_path: Path) -> None:
    """Its second attempt waits for the turn of the first."""
    async with world(tmp_path, hold_seconds=300.0) as gateway:
        gateway.say("hello")
        gateway.server.may_answer.clear()
        async with gateway.openai(timeout=1.0) as client:
            reply = asyncio.ensure_future(client.chat.completions.create(**CHAT))
            await until(lambda: len(gateway.server.prompts) == 2)
            gateway.server.may_answer.set()
            assert (await reply).choices[0].message.content == "hello"
        assert len(await gateway.recorded()) == 1


async def test_a_retry_gets_the_recorded_tokens(gateway: World) -> None:
    """From another replica too, and after the turn's end; an unmarked call is a new turn."""
    gateway.say("hello", "other")
    path = "/v1/chat/completions"
    async with call(gateway, path, CHAT) as response:
        first = await response.json()
    async with http_gateway(gateway.gateway) as other:
        url = gateway.rollout["base_url"].replace(gateway.url, other)
        headers = {"authorization": f"Bearer {gateway.rollout['credential']}", **RETRY}
        async with gateway.http.post(
            f"{url}/chat/completions", json=CHAT, headers=headers
        ) as again:
            second = await again.json()
    async with call(gateway, path, CHAT) as response:
        third = await response.json()
    assert second["id"] == first["id"]
    assert second["choices"] == first["choices"]
    assert third["id"] != first["id"]
    assert third["choices"][0]["message"]["content"] == "other"


async def test_an_idempotency_key_names_the_turn(tmp_path: Path) -> None:
    """Equal keys get one turn; with another body it is a conflict; any text is a key."""
    path, key = "/v1/chat/completions", {"Idempotency-Key": "mine"}
    async with world(tmp_path, hold_seconds=300.0) as gateway:
        gateway.say("hello", "other")
        replies = []
        for _ in range(2):
            async with call(gateway, path, CHAT, **key) as response:
                replies.append(await response.json())
        assert replies[0]["choices"] == replies[1]["choices"]
        assert replies[0]["seamflow"]["turn_id"] == "mine"
        async with call(gateway, path, {**CHAT, "temperature": 0.5}, **key) as response:
            assert response.status == 409
            assert response.headers["x-should-retry"] == "false"
        async with call(gateway, path, CHAT, **{"Idempotency-Key": "a b/ç" * 50}) as response:
            assert response.status == 200


async def test_parallel_retries_get_a_turn_each(gateway: World) -> None:
    """Two equal calls whose gateway was killed: their retries do not share one answer."""
    gateway.say("one", "two")
    gateway.server.may_answer.clear()
    path = "/v1/chat/completions"
    for number in (1, 2):  # calls that nobody waits for any more
        left = asyncio.ensure_future(gone(gateway, path))
        await until(lambda number=number: len(gateway.server.prompts) == number)
        left.cancel()
        await until(lambda number=number: gateway.server.num_cancelled == number)
    gateway.server.may_answer.set()

    async def retry() -> Any:
        async with call(gateway, path, CHAT, **RETRY) as response:
            return (await response.json())["id"]

    names = await asyncio.gather(retry(), retry())
    assert len(set(names)) == 2
    assert len(await gateway.recorded()) == 2


async def gone(gateway: World, path: str) -> None:
    """A call on a connection of its own, which ends with it."""
    url = gateway.rollout["anthropic_base_url"] + path
    headers = {"authorization": f"Bearer {gateway.rollout['credential']}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=CHAT, headers=headers) as response,
    ):
        await response.read()


async def until(condition: Any) -> None:
    """Wait for a condition."""
    while not condition():
        await asyncio.sleep(0.005)


async def test_a_client_that_leaves_stops_the_engine(gateway: World) -> None:
    """Its call at the rollout server is cancelled."""
    gateway.say("hello")
    gateway.server.may_answer.clear()
    async with aiohttp.ClientSession() as session:
        url = f"{gateway.rollout['base_url']}/chat/completions"
        headers = {"authorization": f"Bearer {gateway.rollout['credential']}"}
        response = await session.post(url, json={**CHAT, "stream": True}, headers=headers)
        assert response.status == 200
        await gateway.server.asked.wait()
        response.close()
        await gateway.server.cancelled.wait()
