"""LiteLLM: a loop of tool calls, the first one forced, and an answer with a schema."""

import json
import sys
from typing import Any

import litellm
from pydantic import BaseModel
from two_tools import QUESTION, REPORT, add, weather


class Report(BaseModel):
    """The sum and the weather."""

    total: int
    weather: str


FUNCTIONS = {"add": add, "weather": weather}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
]
MODEL: dict[str, Any] = {
    "model": "openai/policy",
    "api_base": sys.argv[1],
    "api_key": sys.argv[2],
    "temperature": 0,
}

messages: list[Any] = [{"role": "user", "content": QUESTION}]
choice: Any = {"type": "function", "function": {"name": "add"}}
while True:
    reply = litellm.completion(messages=messages, tools=TOOLS, tool_choice=choice, **MODEL)
    message, choice = reply.choices[0].message, "auto"
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
report = litellm.completion(
    messages=[{"role": "user", "content": REPORT}], response_format=Report, **MODEL
)
parsed = Report.model_validate_json(report.choices[0].message.content)
print(json.dumps({"answer": message.content, "report": parsed.model_dump()}))
