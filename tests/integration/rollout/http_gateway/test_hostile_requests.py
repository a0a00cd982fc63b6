"""Bodies and headers that no client should send: refused in the dialect's form, and bounded."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lib.rollout.http_gateway.support import ADD, World, world

NUM_MUTATIONS = 1_000
"""Bodies sent to each route."""
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ],
    "tools": [ADD],
    "tool_choice": "auto",
    "max_tokens": 4,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["x"],
    "stop_token_ids": [3],
    "logprobs": True,
    "top_logprobs": 0,
    "n": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "metadata": {"a": "b"},
}
RESPONSES = {
    "model": "policy",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ],
    "instructions": "be brief",
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
    "max_output_tokens": 4,
    "temperature": 0.7,
    "stream": False,
    "text": {"format": {"type": "text"}},
}
MESSAGES = {
    "model": "policy",
    "max_tokens": 4,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Sure."},
                {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
    ],
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "thinking": {"type": "disabled"},
    "stream": False,
}
GENERATE = {
    "model": "policy",
    "token_ids": [5, 6, 7],
    "sampling_params": {"temperature": 1.0, "max_tokens": 4, "logprobs": 1, "stop_token_ids": [3]},
    "stream": False,
    "cache_salt": "x",
}
FINISH = {
    "rewards": {"reward": 1.0},
    "turn_rewards": {"t": 1.0},
    "untrained_turn_ids": ["t"],
    "policy_failure": "gave up",
}
LEASE = {"max_rollouts": 1, "wait_seconds": 0, "purpose": "train", "request_id": "one"}
START = {"group": {"group_id": "g", "size": 2}, "labels": {"a": "b"}}
ROLLOUT_ROUTES = {
    "v1/chat/completions": CHAT,
    "v1/responses": RESPONSES,
    "v1/messages": MESSAGES,
    "v1/messages/count_tokens": MESSAGES,
    "inference/v1/generate": GENERATE,
    "finish": FINISH,
}
WRONG: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**63) - 1, 0.5, 1e308, -0.0,
    "", "x", "\u0000", "\ud83d\ude00", "\u202e", "{{ 7 * 7 }}", "{% raw %}", "<|end|>", "a" * 5_000,
    [], [[]], [None], ["x"] * 300, {}, {"": {}}, {"type": "image_url"}, {"role": "root"},
)  # fmt: skip


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[World]:
    """A gateway with small limits and a server that always answers."""
    limits: dict[str, Any] = {"max_body_bytes": 64 * 1024, "body_timeout_seconds": 0.2}
    async with world(tmp_path, **limits) as found:
        found.server.default_answer = [[7]]
        yield found


def mutated(body: Any, rng: random.Random) -> bytes:
    """The body with one to three values changed, keys lost or doubled, or bytes broken."""
    changed = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        _mutate(changed, rng)
    data = json.dumps(changed).encode()
    if rng.random() < 0.2:
        at = rng.randrange(len(data))
        cut = rng.choice((b"", b"\xff", b"\x00", b"NaN", b"[" * 300, b'"\\ud800"'))
        data = data[:at] + cut + data[at + rng.randint(0, 5) :]
    return data


def _mutate(value: Any, rng: random.Random) -> None:
    places: list[tuple[Any, Any]] = []
    _walk(value, places.append)
    if not places:
        return
    holder, key = rng.choice(places)
    kind = rng.random()
    if kind < 0.7:
        holder[key] = copy.deepcopy(rng.choice(WRONG))
    elif kind < 0.85:
        del holder[key]
    elif isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    else:
        holder[str(rng.choice(WRONG))[:50]] = holder.pop(key)


def _walk(value: Any, found: Callable[[tuple[Any, Any]], None]) -> None:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in pairs:
        found((value, key))
        if isinstance(each, dict | list):
            _walk(each, found)


def assert_form(path: str, answer: Any) -> str:
    """The error has its dialect's form; its message."""
    if "messages" in path:
        assert answer["type"] == "error"
        assert answer["error"].keys() == {"type", "message"}
    else:
        assert answer["error"].keys() == {"message", "type", "param", "code"}
    message: str = answer["error"]["message"]
    for trace in ("Traceback", "Error:", 'File "', "pydantic", "aiohttp", "grpc", " object at 0x"):
        assert trace not in message
    assert len(message) < 1_000
    return message


@pytest.mark.parametrize("route", [*ROLLOUT_ROUTES, "lease", "start"])
async def test_mutated_bodies(gateway: World, route: str) -> None:
    """Each gets a normal answer, or an error that is the client's own and says so."""
    rng = random.Random(f"bodies for {route}")
    body = ROLLOUT_ROUTES.get(route) or {"lease": LEASE, "start": START}[route]
    statuses: dict[int, int] = {}
    if route == "lease":  # nothing to wait for
        await gateway.store.runs.end_run("run")
    for _ in range(NUM_MUTATIONS):
        status, answer = await send(gateway, route, mutated(body, rng))
        statuses[status] = statuses.get(status, 0) + 1
        if status != 200:
            assert 400 <= status < 500, answer
            assert_form(route, answer)
    assert statuses[400] > NUM_MUTATIONS // 4


async def send(gateway: World, route: str, data: bytes) -> tuple[int, Any]:
    """A body to a route of the evaluation rollout; finished ones are replaced."""
    if route in ROLLOUT_ROUTES:
        url = f"{gateway.rollout['anthropic_base_url']}/{route}"
    else:
        url = f"{gateway.url}/rollouts" + ("/lease" if route == "lease" else "")
    headers = {"authorization": f"Bearer {gateway.rollout['credential']}"}
    headers["content-type"] = "application/json"
    async with gateway.http.post(url, data=data, headers=headers) as response:
        if "text/event-stream" in response.headers["content-type"]:
            assert b"data: " in await response.read()
            return response.status, None
        answer = await response.json()
    if route == "finish" and response.status == 200:
        gateway.rollout = await gateway.start()
    return response.status, answer


@pytest.mark.parametrize("route", ROLLOUT_ROUTES)
async def test_bounds_of_a_body(gateway: World, route: str) -> None:
    """Its size, declared or not, its time, its type and its encoding."""
    url = f"{gateway.rollout['anthropic_base_url']}/{route}"
    headers = {"authorization": f"Bearer {gateway.rollout['credential']}"}

    async def refused(data: Any, **given: str) -> int:
        all_headers = {**headers, "content-type": "application/json", **given}
        async with gateway.http.post(url, data=data, headers=all_headers) as response:
            assert_form(route, await response.json())
            return response.status

    async def unending() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 10_000

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)
        yield b"}"

    assert await refused(b" " * 70_000) == 413
    assert await refused(unending()) == 413
    assert await refused(slow()) == 408
    assert await refused(b"{}", **{"content-type": "text/html"}) == 415
    assert await refused(b"{}", **{"content-encoding": "gzip"}) == 415
    assert await refused(b"{}", authorization="Bearer \u00e9") == 401
    assert await refused(b"{}", authorization=f"Bearer {'a' * 5_000}") == 401
    assert await refused(b"\xef\xbb\xbf") == 400
    assert await refused(b"[" * 60_000) == 400


async def test_unknown_routes_and_methods(gateway: World) -> None:
    """404 and 405 in the form of the dialect; hostile ids of rollouts are 404."""
    hostile = ("%00/v1/messages", "%2e%2e/finish", "a" * 300 + "/extend")
    for path in ("/", "/v1/chat/completions", *(f"/rollouts/{each}" for each in hostile)):
        status, answer = await gateway.post(path, {})
        assert status == 404
        assert_form(path, answer)
    async with gateway.http.get(f"{gateway.url}/rollouts/lease") as response:
        assert response.status == 405
        assert "use POST" in assert_form("", await response.json())


async def test_too_many_open_calls(tmp_path: Path) -> None:
    """Further ones are refused with 429 and a time to come back."""
    async with world(tmp_path, max_open_calls=1) as gateway:
        gateway.say("hello")
        gateway.server.may_answer.clear()
        first = asyncio.ensure_future(send(gateway, "inference/v1/generate", b'{"token_ids": [5]}'))
        await gateway.server.asked.wait()
        async with gateway.http.post(f"{gateway.url}/rollouts", json={}) as response:
            assert (response.status, response.headers["retry-after"]) == (429, "1")
            assert_form("", await response.json())
        gateway.server.may_answer.set()
        assert (await first)[0] == 200
