"""What programs read in replies beside the answer, and in which ways they ask."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.integration.rollout.http_gateway.test_official_sdks import ASK, MODEL, continued
from tests.lib.rollout.gateway.tools import SAID
from tests.lib.rollout.http_gateway.support import ADD, World, world

WORDS = "naïve 数"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[World]:
    """A system with a rollout."""
    async with world(tmp_path) as found:
        yield found


def whole(entries: Any) -> str:
    """The text that the tokens' bytes make."""
    return bytes(byte for entry in entries for byte in entry.bytes).decode()


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_of_chat_name_texts_and_bytes(gateway: World, stream: bool) -> None:
    """Parts of characters too; the end token is one of them."""
    gateway.say(WORDS)
    entries: list[Any] = []
    async with gateway.openai() as client:
        options: Any = {"model": MODEL, "messages": ASK, "logprobs": True, "stream": stream}
        reply: Any = await client.chat.completions.create(**options)
        choices = [c.choices[0] async for c in reply] if stream else reply.choices
        for choice in choices:
            entries += choice.logprobs.content if choice.logprobs else []
    assert whole(entries).startswith(WORDS)
    assert [entry.token for entry in entries[:3]] == ["n", "a", "\N{REPLACEMENT CHARACTER}"]
    assert {entry.logprob for entry in entries} == {-0.5}


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_of_responses_are_of_the_message(gateway: World, stream: bool) -> None:
    """Not of the reasoning before; without `include` there are none."""
    gateway.say(f"<think>hm</think>{WORDS}", WORDS)
    options: Any = {"model": MODEL, "input": "hi", "stream": stream}
    include: Any = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    async with gateway.openai() as client:
        reply: Any = await client.responses.create(**options, include=include)
        if stream:
            *_, last = [event async for event in reply]
            reply = last.response
        part = reply.output[-1].content[0]
        assert whole(part.logprobs) == part.text == WORDS
        plain = await client.responses.create(model=MODEL, input="hi")
    message: Any = plain.output[-1]
    assert message.content[0].logprobs == []


async def test_a_stream_of_messages_begins_with_the_size_of_its_prompt(gateway: World) -> None:
    """And thinking ends with a signature, with which the SDK sends it back as thinking."""
    gateway.say(SAID, "It is 3.")
    tool: Any = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
    options: Any = {"model": MODEL, "max_tokens": 99, "tools": [tool]}
    async with gateway.anthropic() as client:
        async with client.messages.stream(**options, messages=ASK) as stream:
            events = [event async for event in stream]
            message = await stream.get_final_message()
        start: Any = events[0]
        assert start.message.usage.input_tokens == len(gateway.server.prompts[0]) > 0
        thinking: Any = message.content[0]
        assert thinking.type == "thinking"
        assert thinking.signature
        use: Any = message.content[-1]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
        answered: Any = {"role": "user", "content": [result]}
        again = [*ASK, {"role": "assistant", "content": message.content}, answered]
        second = await client.messages.create(**options, messages=again)
    answer: Any = second.content[0]
    assert answer.text == "It is 3."
    await continued(gateway)


async def test_slashes_that_a_proxy_decodes_are_served(gateway: World) -> None:
    """Names of leased rollouts have two; errors still name the route."""
    await gateway.submit("task")
    _, leased = await gateway.post("/rollouts/lease", {})
    (rollout,) = leased["rollouts"]
    assert "%2F" in rollout["base_url"]
    path = unquote(rollout["base_url"].removeprefix(gateway.url))
    bearer = {"authorization": f"Bearer {rollout['credential']}"}
    gateway.say("hello")
    body = {"messages": ASK, "model": MODEL}
    status, reply = await gateway.post(f"{path}/chat/completions", body, headers=bearer)
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "hello")
    status, _ = await gateway.post(
        f"{path.removesuffix('/v1')}/finish", {"rewards": 1}, headers=bearer
    )
    assert status == 200
    status, reply = await gateway.post(f"{path}/nothing", body, headers=bearer)
    assert (status, reply["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("foreign", ["Bearer sk-of-another-service", "Bearer a.b", "Basic eDp5"])
async def test_the_key_of_a_rollout_counts_beside_a_foreign_login(
    gateway: World, foreign: str
) -> None:
    """In either header; control: two foreign ones are refused."""
    own, path = gateway.rollout["credential"], gateway.rollout["base_url"].removeprefix(gateway.url)
    body = {"messages": ASK, "model": MODEL}
    for headers in (
        {"x-api-key": own, "authorization": foreign},
        {"x-api-key": foreign.split()[1], "authorization": f"Bearer {own}"},
    ):
        gateway.say("hello")
        status, _ = await gateway.post(f"{path}/chat/completions", body, headers=headers)
        assert status == 200, headers
    wrong = {"x-api-key": "other", "authorization": foreign}
    status, _ = await gateway.post(f"{path}/chat/completions", body, headers=wrong)
    assert status == 401


async def test_separators_of_lines_are_escaped_in_events(gateway: World) -> None:
    """A reader by `str.splitlines` gets the events that others get."""
    text = "a\u2028b\u2029c\x85d"
    gateway.say(text)
    url = f"{gateway.rollout['base_url']}/chat/completions"
    bearer = {"authorization": f"Bearer {gateway.rollout['credential']}"}
    body = {"messages": ASK, "model": MODEL, "stream": True, "tools": [ADD]}
    async with gateway.http.post(url, json=body, headers=bearer) as response:
        lines = (await response.text()).splitlines()
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"].get("content", "") for each in data for choice in each["choices"]]
    assert "".join(deltas) == text
    assert all(line == "" or line.startswith("data: ") for line in lines)
