"""The tool agent of examples/openai_agent.py on several SDKs, which logs what its calls returned.

FORMS names the forms of a rollout's calls, one for each rollout in turn: chat, chat_stream,
responses, messages. LOG_FOLDER gets `calls.jsonl`, a line for each call, and `received.jsonl`, a
line for each call whose reply has token ids. The SDKs have their defaults, but for the log of
connections.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from examples.http_rollouts import run_rollouts
from examples.quickstart.lift import RIDE, Lift

FORMS = os.environ["FORMS"].split(",")
FOLDER = Path(os.environ["LOG_FOLDER"])
MAX_TURNS = 4
MAX_TOKENS = 96
CHAT_TOOL: Any = {"type": "function", "function": RIDE}
RESPONSES_TOOL: Any = {"type": "function", **RIDE, "strict": False}
MESSAGES_TOOL: Any = {
    "name": RIDE["name"],
    "description": RIDE["description"],
    "input_schema": RIDE["parameters"],
}


class Calls:
    """One rollout's calls."""

    def __init__(self, form: str, rollout: Mapping[str, Any], clients: tuple[Any, Any]) -> None:
        openai, anthropic = clients
        key = rollout["credential"]
        self._form, self._rollout_id = form, rollout["rollout_id"]
        self._openai = openai.with_options(base_url=rollout["base_url"], api_key=key)
        url = rollout["anthropic_base_url"]
        self._anthropic = anthropic.with_options(base_url=url, api_key=key)
        self._history: list[Any] = []

    async def ride(self, lift: Lift) -> dict[str, float]:
        """Let the model ride until it answers without a tool call; returns the rewards."""
        self._history = [{"role": "user", "content": lift.call()}]
        for _ in range(MAX_TURNS):
            try:
                calls, turn_id, num_tokens = await getattr(self, f"_{self._form}")()
            except Exception as error:
                self._log("calls", form=self._form, error=repr(error)[:500])
                raise
            self._log("calls", form=self._form, turn_id=turn_id, num_tokens=num_tokens)
            results = [
                (call_id, lift.ride(arguments.get("floors"))) for call_id, arguments in calls
            ]
            if not results:
                break
            self._history += self._results(results)
        return lift.rewards()

    async def _chat(self) -> Any:
        reply = await self._openai.chat.completions.create(
            model="policy",
            messages=self._history,
            tools=[CHAT_TOOL],
            max_completion_tokens=MAX_TOKENS,
            extra_body={"return_token_ids": True},
        )
        message = reply.choices[0].message
        self._history.append(message)
        self._log_tokens(reply.seamflow, reply.choices[0].token_ids)
        calls = [(c.id, json.loads(c.function.arguments)) for c in message.tool_calls or ()]
        return calls, reply.seamflow["turn_id"], reply.usage.completion_tokens

    async def _chat_stream(self) -> Any:
        stream = await self._openai.chat.completions.create(
            model="policy",
            messages=self._history,
            tools=[CHAT_TOOL],
            max_completion_tokens=MAX_TOKENS,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        content, fields = "", None
        calls: list[dict[str, Any]] = []
        ids: list[int] = []
        async for chunk in stream:
            choice = chunk.choices[0]
            content += choice.delta.content or ""
            calls += [c.model_dump(exclude={"index"}) for c in choice.delta.tool_calls or ()]
            ids += (choice.model_extra or {}).get("token_ids") or ()
            fields = (chunk.model_extra or {}).get("seamflow") or fields
        if fields is None:
            raise ConnectionError("the stream has no end")
        answer = {"role": "assistant", "content": content, "tool_calls": calls or None}
        self._history.append(answer)
        self._log_tokens(fields, ids)
        read = [(c["id"], json.loads(c["function"]["arguments"])) for c in calls]
        return read, fields["turn_id"], len(ids)

    async def _responses(self) -> Any:
        reply = await self._openai.responses.create(
            model="policy",
            input=self._history,
            tools=[RESPONSES_TOOL],
            max_output_tokens=MAX_TOKENS,
        )
        self._history += reply.output
        found = [item for item in reply.output if item.type == "function_call"]
        calls = [(item.call_id, json.loads(item.arguments)) for item in found]
        return calls, reply.seamflow["turn_id"], reply.usage.output_tokens

    async def _messages(self) -> Any:
        reply = await self._anthropic.messages.create(
            model="policy",
            messages=self._history,
            tools=[MESSAGES_TOOL],
            max_tokens=MAX_TOKENS,
        )
        self._history.append({"role": "assistant", "content": reply.content})
        calls = [(block.id, block.input) for block in reply.content if block.type == "tool_use"]
        return calls, reply.seamflow["turn_id"], reply.usage.output_tokens

    def _results(self, results: list[tuple[str, str]]) -> list[Any]:
        if self._form == "responses":
            kind = "function_call_output"
            return [{"type": kind, "call_id": call, "output": text} for call, text in results]
        if self._form == "messages":
            blocks = [
                {"type": "tool_result", "tool_use_id": call, "content": text}
                for call, text in results
            ]
            return [{"role": "user", "content": blocks}]
        return [{"role": "tool", "tool_call_id": call, "content": text} for call, text in results]

    def _log_tokens(self, fields: Any, ids: list[int]) -> None:
        spans = [
            (s["start"], s["num_tokens"], s["weight_version"], "")
            for s in fields["weight_versions"]
        ]
        self._log("received", turn_id=fields["turn_id"], offset=0, token_ids=ids, spans=spans)

    def _log(self, name: str, **fields: Any) -> None:
        line = json.dumps({"rollout_id": self._rollout_id, **fields})
        with (FOLDER / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class Retries(logging.Handler):
    """Counts the calls that the SDKs repeat, in `retries.jsonl`."""

    def emit(self, record: logging.LogRecord) -> None:
        """A line of an SDK's log."""
        if "retry" in record.getMessage().lower():
            with (FOLDER / "retries.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"sdk": record.name, "said": record.getMessage()}) + "\n")


async def main() -> None:
    """Work on leased tasks until the run ends."""
    for sdk in ("openai", "anthropic"):
        logging.getLogger(sdk).setLevel(logging.INFO)
        logging.getLogger(sdk).addHandler(Retries())
    forms = itertools.cycle(FORMS)
    async with (
        AsyncOpenAI(api_key="of each rollout") as openai,
        AsyncAnthropic(api_key="of each rollout") as anthropic,
    ):

        async def agent(rollout: Mapping[str, Any]) -> dict[str, float]:
            calls = Calls(next(forms), rollout, (openai, anthropic))
            return await calls.ride(Lift(rollout["task"]["payload"]))

        await run_rollouts(agent)


if __name__ == "__main__":
    asyncio.run(main())
