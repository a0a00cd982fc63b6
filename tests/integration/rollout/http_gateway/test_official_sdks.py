"""The official SDKs of OpenAI and Anthropic against the HTTP gateway."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import trustme

from tests.lib.rollout.gateway.tools import ARGUMENTS, SAID
from tests.lib.rollout.http_gateway.support import ADD, World, http_gateway, world

ASK: Any = [{"role": "user", "content": "1 + 2?"}]
MODEL = "policy"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[World]:
    """A system with a rollout."""
    async with world(tmp_path) as found:
        yield found


async def continued(gateway: World) -> None:
    """The second turn's prompt begins with all tokens of the first."""
    first, second = (await gateway.recorded()).values()
    assert second.prefix_turn_id == first.turn_id
    assert second.prefix_length == len(first.tokens.token_ids)


async def test_chat_with_tools_and_reasoning(gateway: World) -> None:
    """Parsed, echoed back as the SDK returns it, and continued on recorded ids."""
    gateway.say(SAID, "It is 3.")
    async with gateway.openai() as client:
        first = await client.chat.completions.create(model=MODEL, messages=ASK, tools=[ADD])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "Sure."
        assert message.model_extra is not None
        assert message.model_extra["reasoning_content"] == "hm"
        assert message.tool_calls is not None
        call: Any = message.tool_calls[0]
        assert json.loads(call.function.arguments) == ARGUMENTS
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        again: Any = [*ASK, message, result]
        second = await client.chat.completions.create(model=MODEL, messages=again, tools=[ADD])
    assert second.choices[0].message.content == "It is 3."
    assert second.choices[0].finish_reason == "stop"
    assert second.usage is not None
    assert second.usage.prompt_tokens == len(gateway.server.prompts[1])
    await continued(gateway)


async def test_a_chat_stream(gateway: World) -> None:
    """The SDK's own accumulation of the chunks is the answer; the tool call is one delta."""
    gateway.say(SAID)
    async with (
        gateway.openai() as client,
        client.chat.completions.stream(
            model=MODEL, messages=ASK, tools=[ADD], stream_options={"include_usage": True}
        ) as stream,
    ):
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        final = await stream.get_final_completion()
    calls = [c for c in chunks if c.choices and c.choices[0].delta.tool_calls]
    assert len(calls) == 1
    assert final.choices[0].message.content == "Sure."
    assert final.choices[0].message.tool_calls is not None
    call: Any = final.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == ARGUMENTS
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage is not None
    assert final.usage.prompt_tokens == len(gateway.server.prompts[0])


async def test_token_fields_of_vllm(gateway: World) -> None:
    """Ids and log-probs of prompt and answer, whole and streamed, and the spans of versions."""
    gateway.say("hello")
    gateway.say("hello")
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    options: Any = {"model": MODEL, "messages": ASK, "logprobs": True, "top_logprobs": 0}
    async with gateway.openai() as client:
        whole = await client.chat.completions.create(**options, extra_body=extra)
        stream = await client.chat.completions.create(**options, extra_body=extra, stream=True)
        chunks = [chunk async for chunk in stream]
    fields = whole.model_extra or {}
    choice = whole.choices[0]
    ids = (choice.model_extra or {})["token_ids"]
    assert fields["prompt_token_ids"] == gateway.server.prompts[0]
    assert gateway.template.text(ids) == "hello<|end|>"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [c.token for c in choice.logprobs.content] == [f"token_id:{i}" for i in ids]
    assert {c.logprob for c in choice.logprobs.content} == {-0.5}
    (span,) = fields["seamflow"]["weight_versions"]
    assert span == {"start": 0, "num_tokens": len(ids), "weight_version": 0}
    streamed = [i for c in chunks for i in (c.choices[0].model_extra or {}).get("token_ids", ())]
    assert streamed == ids
    assert (chunks[-1].model_extra or {})["prompt_token_ids"] == gateway.server.prompts[1]


async def test_responses_with_tools(gateway: World) -> None:
    """Reasoning, message and call are items; sent back with the result, they match the record."""
    gateway.say(SAID, "It is 3.")
    tool: Any = {"type": "function", **ADD["function"], "strict": False}
    async with gateway.openai() as client:
        given: list[Any] = [{"role": "user", "content": "1 + 2?"}]
        first = await client.responses.create(model=MODEL, input=given, tools=[tool])
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.output_text == "Sure."
        call = first.output[-1]
        assert call.type == "function_call"
        assert json.loads(call.arguments) == ARGUMENTS
        given += first.output
        given.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        second = await client.responses.create(model=MODEL, input=given, tools=[tool])
    assert (second.output_text, second.status) == ("It is 3.", "completed")
    await continued(gateway)


async def test_a_stream_of_responses(gateway: World) -> None:
    """Events in order with their numbers; the SDK's accumulated response is complete."""
    gateway.say(SAID)
    tool: Any = {"type": "function", **ADD["function"], "strict": False}
    async with (
        gateway.openai() as client,
        client.responses.stream(model=MODEL, input="1 + 2?", tools=[tool]) as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_response()
    numbers = [e.sequence_number for e in events]
    assert numbers == sorted(numbers)
    kinds = list(dict.fromkeys(e.type for e in events))
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Sure."


async def test_anthropic_messages_with_tools(gateway: World) -> None:
    """Thinking, text and tool_use are blocks; sent back with the result, they match the record."""
    gateway.say(SAID, "It is 3.")
    tool: Any = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
    options: Any = {"model": MODEL, "max_tokens": 200, "tools": [tool]}
    async with gateway.anthropic() as client:
        first = await client.messages.create(messages=ASK, **options)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert first.stop_reason == "tool_use"
        use = first.content[-1]
        assert use.type == "tool_use"
        assert use.input == ARGUMENTS
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
        turns = [
            *ASK,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        count = await client.messages.count_tokens(model=MODEL, messages=turns, tools=[tool])
        second = await client.messages.create(messages=turns, **options)
    assert second.content[0].type == "text"
    assert second.content[0].text == "It is 3."
    assert second.stop_reason == "end_turn"
    assert second.usage.input_tokens == len(gateway.server.prompts[1])
    assert count.input_tokens > 0
    await continued(gateway)


async def test_a_stream_of_anthropic_messages(gateway: World) -> None:
    """The SDK's accumulated message is complete."""
    gateway.say(SAID)
    tool: Any = {"name": "add", "input_schema": {"type": "object"}}
    async with (
        gateway.anthropic() as client,
        client.messages.stream(model=MODEL, max_tokens=200, messages=ASK, tools=[tool]) as stream,
    ):
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[-1].type == "tool_use"
    assert final.content[-1].input == ARGUMENTS
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == len(SAID) + 1


async def test_stop_strings(gateway: World) -> None:
    """The answer ends before the string, which the reply names."""
    gateway.say("one/two", "one/two")
    async with gateway.openai() as client:
        chat = await client.chat.completions.create(model=MODEL, messages=ASK, stop=["/"])
    async with gateway.anthropic() as client:
        message = await client.messages.create(
            model=MODEL, max_tokens=99, messages=ASK, stop_sequences=["/"]
        )
    assert chat.choices[0].message.content == "one"
    assert (chat.choices[0].model_extra or {})["stop_reason"] == "/"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "/")


async def test_models(gateway: World) -> None:
    """Both SDKs list the one model."""
    async with gateway.openai() as client:
        (model,) = (await client.models.list()).data
    async with gateway.anthropic() as other:
        (same,) = (await other.models.list()).data
    assert model.id == same.id
    assert "max_model_len" in (model.model_extra or {})


async def test_errors_are_the_sdks_own(gateway: World) -> None:
    """By status and parameter; nothing is retried in vain."""
    async with gateway.openai() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=ASK, n=2)
        assert (refused.value.param, refused.value.code) == ("n", "unsupported_value")
        with pytest.raises(openai.BadRequestError) as unknown:
            await client.chat.completions.create(
                model=MODEL, messages=ASK, extra_body={"grammar": "x"}
            )
        assert unknown.value.param == "grammar"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").chat.completions.create(
                model=MODEL, messages=ASK
            )
    async with gateway.anthropic() as other:
        with pytest.raises(anthropic.BadRequestError) as wrong:
            await other.messages.create(model=MODEL, max_tokens=0, messages=ASK)
        assert isinstance(wrong.value.body, dict)
        assert wrong.value.body["error"]["type"] == "invalid_request_error"
        assert "max_tokens is 0" in wrong.value.body["error"]["message"]


async def test_late_calls_are_refused_for_good(gateway: World) -> None:
    """A finished rollout: 409, which the SDK must not retry."""
    url, rollout = gateway.rollout["base_url"].removesuffix("/v1"), gateway.rollout
    headers = {"authorization": f"Bearer {rollout['credential']}"}
    async with gateway.http.post(f"{url}/finish", json={"rewards": 1.0}, headers=headers) as done:
        assert done.status == 200
    async with gateway.openai() as client:
        with pytest.raises(openai.ConflictError) as late:
            await client.chat.completions.create(model=MODEL, messages=ASK)
    assert late.value.response.headers["x-should-retry"] == "false"
    assert "x-stainless-retry-count" in late.value.request.headers
    assert late.value.request.headers["x-stainless-retry-count"] == "0"


async def test_parallel_sub_agents_and_a_rewritten_history_fork(gateway: World) -> None:
    """Each branch continues what it shares with the record, and nothing is taken for another."""
    gateway.say("plan", "left", "right", "again")
    plan = {"role": "assistant", "content": "plan"}
    rewritten = {"role": "assistant", "content": "another plan"}
    async with gateway.openai() as client:

        async def ask(*messages: Any) -> dict[str, Any]:
            reply = await client.chat.completions.create(model=MODEL, messages=[*ASK, *messages])
            return dict((reply.model_extra or {})["seamflow"])

        first = await ask()
        branches = await asyncio.gather(
            *(ask(plan, {"role": "user", "content": text}) for text in ("a", "b"))
        )
        fork = await ask(rewritten, {"role": "user", "content": "a"})
    assert [branch["prefix_turn_id"] for branch in branches] == [first["turn_id"]] * 2
    whole = len(gateway.server.prompts[0]) + sum(
        span["num_tokens"] for span in first["weight_versions"]
    )
    assert [branch["prefix_length"] for branch in branches] == [whole] * 2
    assert fork["prefix_length"] < whole


async def test_tls(tmp_path: Path) -> None:
    """With a certificate the gateway serves HTTPS alone, as the SDK expects."""
    authority = trustme.CA()
    ca, certificate = tmp_path / "ca.pem", tmp_path / "cert.pem"
    key = tmp_path / "key.pem"
    authority.cert_pem.write_to_path(ca)
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(certificate)
    files = {"tls_cert_file": certificate, "tls_key_file": key}
    async with world(tmp_path) as plain, http_gateway(plain.gateway, **files) as url:
        plain.say("hello")
        trusted = httpx2.AsyncClient(verify=ssl.create_default_context(cafile=str(ca)))
        base = plain.rollout["base_url"].replace(plain.url, url.replace("http:", "https:"))
        async with plain.openai(http_client=trusted) as client:
            reply = await client.with_options(base_url=base).chat.completions.create(
                model=MODEL, messages=ASK
            )
        assert reply.choices[0].message.content == "hello"
        async with httpx2.AsyncClient() as without_tls:
            with pytest.raises(httpx2.RemoteProtocolError):
                await without_tls.get(f"{url}/rollouts/lease")
