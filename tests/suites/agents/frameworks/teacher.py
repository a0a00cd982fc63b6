"""What a good policy says to each request of the frameworks: the model is taught it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb

from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.http_gateway.dialects.anthropic_messages import AnthropicMessages
from rollout.http_gateway.dialects.chat_completions import ChatCompletions
from rollout.http_gateway.dialects.dialect import Dialect, TurnRequest
from rollout.http_gateway.dialects.responses import Responses
from services.lib.token_bytes import unpack_ids
from tests.lib.rollout.gateway.support import ScriptedServer
from tests.lib.rollout.http_gateway.support import World, world
from tests.suites.roundtrips.families import FAMILIES

FAMILY = FAMILIES["hermes"]
"""Its chat template and special tokens are the policy's."""
_HEADER = "<|im_start|>assistant\n"
"""With which the chat template ends a prompt."""

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": AnthropicMessages(),
}
REPORT = {"total": 5, "weather": "sunny in Ulm"}
_SAID = "The sum is 5, and it is sunny in Ulm."


class TeacherServer(ScriptedServer):
    """A rollout server that says what it is told, after what the prompt has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.said = ""
        """The next answer."""
        self.template: ChatTemplate

    async def GenerateTokens(
        self, request: server_pb.GenerateTokensRequest, context: Any
    ) -> AsyncIterator[server_pb.GenerateTokensResponse]:
        """The rest of the answer."""
        prompt = self.template.text(unpack_ids(request.token_ids))
        begun = prompt.rpartition(_HEADER)[2]
        if not self.said.startswith(begun):
            raise AssertionError(f"the prompt begins {begun!r}, not {self.said[:80]!r}")
        ids = self.template.encode_text(self.said[len(begun) :] + "<|im_end|>")
        self.answers.append([ids])
        async for response in super().GenerateTokens(request, context):
            yield response


@asynccontextmanager
async def taught_world(
    folder: Path, model: Path | None = None
) -> AsyncIterator[tuple[World, TeacherServer]]:
    """A system whose rollout server is told what to say; `model` None: its tokens are bytes."""
    server = TeacherServer()
    model = FAMILY.make_model(folder / "model") if model is None else model
    server.template = ChatTemplate(model)
    async with world(folder, model=model, server=server) as found:
        yield found, server


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
