"""What the official Python SDKs get from a served run: each check prints a line, then the sum.

python -m tests.suites.agents.sdk_checks http://127.0.0.1:8080
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx2
import openai
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from examples.quickstart.lift import RIDE

URL = sys.argv[1] if len(sys.argv) > 1 else ""
ASK: Any = [{"role": "user", "content": "at 12 up to 15"}]
NEXT = "at 15 up to 17"
CHAT: Any = {
    "model": "policy",
    "tools": [{"type": "function", "function": RIDE}],
    "max_completion_tokens": 96,
    "temperature": 0.2,
}
RESPONSES: Any = {
    "model": "policy",
    "tools": [{"type": "function", **RIDE, "strict": False}],
    "max_output_tokens": 96,
    "temperature": 0.2,
}
MESSAGES: Any = {
    "model": "policy",
    "tools": [
        {
            "name": RIDE["name"],
            "description": RIDE["description"],
            "input_schema": RIDE["parameters"],
        }
    ],
    "max_tokens": 96,
    "extra_body": {"temperature": 0.2},  # no parameter of this SDK any more
}

CUT_SECONDS = 0.02


class CutOnce(httpx2.AsyncBaseTransport):
    """Closes the connection of the first request while its turn is sampled."""

    def __init__(self) -> None:
        self._transport = httpx2.AsyncHTTPTransport()
        self.num_requests = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Forward a request."""
        self.num_requests += 1
        limit = CUT_SECONDS if self.num_requests == 1 else None
        try:
            async with asyncio.timeout(limit):
                return await self._transport.handle_async_request(request)
        except TimeoutError:
            raise httpx2.ReadError("cut") from None


class Rollout:
    """A rollout of one check."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.url, self.key = fields["base_url"], fields["credential"]
        self.anthropic_url = fields["anthropic_base_url"]

    def openai(self, **settings: Any) -> AsyncOpenAI:
        """The SDK of OpenAI."""
        return AsyncOpenAI(base_url=self.url, api_key=self.key, **settings)

    def anthropic(self, **settings: Any) -> AsyncAnthropic:
        """The SDK of Anthropic."""
        return AsyncAnthropic(base_url=self.anthropic_url, api_key=self.key, **settings)

    async def finish(self) -> None:
        """End it."""
        async with httpx2.AsyncClient(headers={"x-api-key": self.key}) as http:
            reply = await http.post(f"{self.anthropic_url}/finish", json={"rewards": 1.0})
            assert reply.status_code == 200, reply.text


async def chat(rollout: Rollout) -> None:
    """Two turns with a tool call between them; the second continues on recorded ids."""
    async with rollout.openai() as client:
        first: Any = await client.chat.completions.create(messages=ASK, **CHAT)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert "floors" in json.loads(message.tool_calls[0].function.arguments)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": NEXT}
        messages = [*ASK, message, result]
        second: Any = await client.chat.completions.create(messages=messages, **CHAT)
    _continues(first.seamflow, second.seamflow, first.usage.total_tokens)


async def chat_stream(rollout: Rollout) -> None:
    """The accumulated chunks are a whole answer."""
    async with (
        rollout.openai() as client,
        client.chat.completions.stream(messages=ASK, **CHAT) as stream,
    ):
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    calls: Any = final.choices[0].message.tool_calls
    assert "floors" in json.loads(calls[0].function.arguments)


async def responses(rollout: Rollout) -> None:
    """Two turns of items."""
    async with rollout.openai() as client:
        first: Any = await client.responses.create(input=ASK, **RESPONSES)
        call = first.output[-1]
        assert call.type == "function_call"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": NEXT}
        items = [*ASK, *first.output, result]
        second: Any = await client.responses.create(input=items, **RESPONSES)
    _continues(first.seamflow, second.seamflow, first.usage.total_tokens)


async def responses_stream(rollout: Rollout) -> None:
    """The accumulated events are a whole response."""
    async with (
        rollout.openai() as client,
        client.responses.stream(input=ASK, **RESPONSES) as stream,
    ):
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output[-1].type == "function_call"


async def messages(rollout: Rollout) -> None:
    """Two turns of blocks, and the number of tokens of a prompt."""
    async with rollout.anthropic() as client:
        count = await client.messages.count_tokens(
            model="policy", messages=ASK, tools=MESSAGES["tools"]
        )
        first: Any = await client.messages.create(messages=ASK, **MESSAGES)
        assert first.stop_reason == "tool_use"
        assert first.usage.input_tokens == count.input_tokens
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": NEXT}
        turns = [
            *ASK,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second: Any = await client.messages.create(messages=turns, **MESSAGES)
    total = first.usage.input_tokens + first.usage.output_tokens
    _continues(first.seamflow, second.seamflow, total)


async def messages_stream(rollout: Rollout) -> None:
    """The accumulated events are a whole message."""
    async with (
        rollout.anthropic() as client,
        client.messages.stream(messages=ASK, **MESSAGES) as stream,
    ):
        final = await stream.get_final_message()
    assert final.content[-1].type == "tool_use"


async def models(rollout: Rollout) -> None:
    """Both SDKs list the model and its context."""
    async with rollout.openai() as client:
        (model,) = (await client.models.list()).data
    assert (model.model_extra or {})["max_model_len"] > 0
    async with rollout.anthropic() as other:
        assert (await other.models.list()).data[0].id == model.id


async def errors(rollout: Rollout) -> None:
    """Each is the SDK's own class, and names the parameter."""
    async with rollout.openai() as client, rollout.anthropic() as other:
        refused = await _raised(
            openai.BadRequestError, client.chat.completions.create(messages=ASK, n=2, **CHAT)
        )
        assert refused.param == "n"
        too_long: Any = [{"role": "user", "content": "at 12 up to 15 " * 2_000}]
        longer = await _raised(
            openai.BadRequestError, client.chat.completions.create(messages=too_long, **CHAT)
        )
        assert longer.code == "context_length_exceeded"
        long = await _raised(
            anthropic.BadRequestError, other.messages.create(messages=too_long, **MESSAGES)
        )
        assert "prompt is too long" in str(long)
        wrong = client.with_options(api_key="wrong").chat.completions
        await _raised(openai.AuthenticationError, wrong.create(messages=ASK, **CHAT))
        await _raised(
            anthropic.AuthenticationError,
            other.with_options(api_key="wrong").messages.create(messages=ASK, **MESSAGES),
        )


async def late(rollout: Rollout) -> None:
    """A finished rollout refuses calls for good: one request, no retry."""
    await rollout.finish()
    async with rollout.openai() as client:
        error = await _raised(
            openai.ConflictError, client.chat.completions.create(messages=ASK, **CHAT)
        )
    assert error.response.headers["x-should-retry"] == "false"
    assert error.request.headers["x-stainless-retry-count"] == "0"


async def retries(rollout: Rollout) -> None:
    """A connection that broke: the SDK's second request is answered; `equal_calls` sees by what."""
    cut = CutOnce()
    async with rollout.openai(http_client=httpx2.AsyncClient(transport=cut)) as client:
        reply: Any = await client.chat.completions.create(messages=ASK, **CHAT)
    assert reply.id
    assert cut.num_requests == 2
    cut = CutOnce()
    async with rollout.anthropic(http_client=httpx2.AsyncClient(transport=cut)) as other:
        message: Any = await other.messages.create(messages=ASK, **MESSAGES)
    assert message.id
    assert cut.num_requests == 2


CHECKS: tuple[Callable[[Rollout], Awaitable[None]], ...] = (
    chat,
    chat_stream,
    responses,
    responses_stream,
    messages,
    messages_stream,
    models,
    errors,
    late,
    retries,
)


def _continues(first: dict[str, Any], second: dict[str, Any], num_tokens: int) -> None:
    assert second["prefix_turn_id"] == first["turn_id"]
    assert second["prefix_length"] == num_tokens


async def _raised(kind: type[Any], call: Awaitable[Any]) -> Any:
    try:
        await call
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


async def main() -> None:
    """Run all checks, each in a rollout of its own."""
    failed = []
    async with httpx2.AsyncClient(base_url=URL) as http:
        for check in CHECKS:
            reply = await http.post("/rollouts", json={}, timeout=60.0)
            try:
                await check(Rollout(reply.json()))
            except Exception as error:
                failed.append(f"{check.__name__}: {error!r}"[:300])
    print(json.dumps({"checks": len(CHECKS), "failed": failed}))


if __name__ == "__main__":
    asyncio.run(main())
