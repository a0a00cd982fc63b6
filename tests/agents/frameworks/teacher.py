"""What a good policy says to each request of the frameworks: the model is taught it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollout.http_gateway.dialects.anthropic_messages import AnthropicMessages
from rollout.http_gateway.dialects.chat_completions import ChatCompletions
from rollout.http_gateway.dialects.dialect import Dialect, TurnRequest
from rollout.http_gateway.dialects.responses import Responses

__all__ = ["answer_to", "parsed"]

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": AnthropicMessages(),
}
REPORT = {"total": 5, "weather": "sunny in Ulm"}
_SAID = "The sum is 5, and it is sunny in Ulm."


def parsed(path: str, body: Mapping[str, Any]) -> TurnRequest:
    """A request to `path`, as the HTTP gateway reads it."""
    return DIALECTS[path].parse(json.dumps(body).encode())


def answer_to(request: TurnRequest) -> str:
    """The whole answer: both tools in turn, then what the agent ends with."""
    names = [tool.get("function", tool)["name"] for tool in request.tools]
    num_results = sum(map(_is_result, request.messages))
    if num_results == 0 and "add" in names:
        return _call("add", {"a": 2, "b": 3})
    if num_results == 1 and "weather" in names:
        return _call("weather", {"city": "Ulm"})
    if "final_answer" in names:  # of smolagents
        return _call("final_answer", {"answer": _SAID})
    if others := [name for name in names if name not in ("add", "weather")]:
        return _call(others[0], REPORT)  # an answer in the form of a call
    return json.dumps(REPORT) if request.response_schema is not None else _SAID


def _is_result(message: Mapping[str, Any]) -> bool:
    """Whether a tool has said it; smolagents sends results as the user's text."""
    text = json.dumps(message.get("content"))
    return message["role"] == "tool" or (message["role"] == "user" and "Observation:" in text[:40])


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"\n<tool_call>\n{call}\n</tool_call>"
