"""Messages of the contract as dicts in the form of OpenAI's chat API, of any role."""

from __future__ import annotations

import json
from typing import Any

from seamflow.client.messages import from_message
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb


def to_dict(message: rollout_pb.Message) -> dict[str, Any]:
    """A message of any role."""
    given = from_message(message)
    if message.tool_call_id:
        given["tool_call_id"] = message.tool_call_id
    if message.name:
        given["name"] = message.name
    return given


def tool_dict(tool: rollout_pb.Tool) -> dict[str, Any]:
    """A tool."""
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.parameters_json:
        function["parameters"] = json.loads(tool.parameters_json)
    return {"type": "function", "function": function}
