"""What agents ask of an answer over HTTP: bodies x dialects, with status and meaning.

The right values are those of the dialects' specifications: which requests are answered, what the
reply has to be, and what is refused by the parameter's name.
"""

from __future__ import annotations

import atexit
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.lib.rollout.http_gateway.support import World
from tests.suites.agents.frameworks.teacher import FAMILY, TeacherServer, taught_world
from tests.suites.field.event_loop import run
from tests.suites.field.kind import Kind

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)
"""Before a chat template: it takes one system message, the first, as Qwen 3.5's does."""
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, whatever its dialect."""

    dialect: str
    choice: str = "auto"
    """auto, none, required, named, unknown."""
    tools: tuple[str, ...] = ()
    format: str = ""
    """text, object, schema, scalar, broken."""
    systems: int = 0
    """System messages at the start."""
    later_system: bool = False
    is_strict: bool = False
    """Whether the chat template takes one system message alone."""
    stream: bool = False

    @property
    def refused(self) -> bool:
        """Whether it cannot be met."""
        forces = self.choice in ("required", "named", "unknown")
        return (
            (forces and not self.tools)
            or self.choice == "unknown"
            or self.format in ("scalar", "broken")
            or (self.later_system and self.is_strict)
        )

    @property
    def calls(self) -> bool:
        """Whether the answer is a tool call."""
        return self.choice in ("required", "named")

    @property
    def has_schema(self) -> bool:
        return self.format in ("object", "schema")


async def check_asked(asked: Asked) -> None:
    """Refused by name, or answered as asked."""
    found, server = await _world(is_strict=asked.is_strict)
    rollout = found.rollout
    said = _said(asked)
    server.said, before = said, len(server.prompts)
    url = f"{found.url}/rollouts/{rollout['rollout_id']}/v1/{PATHS[asked.dialect]}"
    headers = {"authorization": f"Bearer {rollout['credential']}"}
    async with found.http.post(url, json=_body(asked), headers=headers) as response:
        text = await response.text()
        tool_check = response.headers.get("seamflow-tool-choice", "")
        schema_check = response.headers.get("seamflow-schema", "")
    if asked.refused:
        assert response.status == 400, text
        assert len(server.prompts) == before
        return
    assert response.status == 200, text
    assert tool_check == ("valid" if asked.calls else "")
    expected = "unchecked; the answer is a tool call" if asked.calls else "valid"
    assert schema_check == (expected if asked.has_schema else "")
    prompt = server.template.text(server.prompts[-1])
    _check_prompt(asked, prompt)
    if not asked.stream:
        _check_reply(asked, json.loads(text))


def _check_prompt(asked: Asked, prompt: str) -> None:
    """All system messages are there, joined if the template wants so; tools with any choice."""
    systems = [f"Rule {i}." for i in range(asked.systems)]
    for rule in systems:
        assert prompt.count(rule) == 1
    if asked.is_strict and systems:
        assert "\n\n".join(systems) in prompt
    assert ("Later rule." in prompt) == asked.later_system
    shown = [name for name in asked.tools if f'"{name}"' in prompt]
    assert shown == list(asked.tools)


def _check_reply(asked: Asked, reply: Mapping[str, Any]) -> None:
    content, calls = _READ[asked.dialect](reply)
    if asked.calls:
        assert [call[0] for call in calls] == [asked.tools[-1]]
        assert json.loads(json.dumps(calls[0][1])) == {"name": "Ulm"}
    else:
        assert (content, calls) == (_said(asked), [])


def _read_chat(reply: Mapping[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    message = reply["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"] or "", [(c["name"], json.loads(c["arguments"])) for c in calls]


def _read_responses(reply: Mapping[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    texts = [item["content"][0]["text"] for item in reply["output"] if item["type"] == "message"]
    calls = [item for item in reply["output"] if item["type"] == "function_call"]
    return "".join(texts), [(c["name"], json.loads(c["arguments"])) for c in calls]


def _read_messages(reply: Mapping[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    texts = [block["text"] for block in reply["content"] if block["type"] == "text"]
    calls = [block for block in reply["content"] if block["type"] == "tool_use"]
    return "".join(texts), [(c["name"], c["input"]) for c in calls]


_READ = {"chat": _read_chat, "responses": _read_responses, "messages": _read_messages}


def _said(asked: Asked) -> str:
    if asked.calls and asked.tools:
        call = json.dumps({"name": asked.tools[-1], "arguments": {"name": "Ulm"}})
        return f"\n<tool_call>\n{call}\n</tool_call>"
    return '{"name": "Ulm"}' if asked.has_schema else "It is Ulm."


def _schema(asked: Asked) -> dict[str, Any]:
    others: dict[str, dict[str, Any]] = {"scalar": {"type": "string"}, "broken": {"type": 3}}
    return others.get(asked.format, CITY)


def _body(asked: Asked) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "policy", "stream": asked.stream}
    return {**body, **_BODIES[asked.dialect](asked)}


def _chat(asked: Asked) -> dict[str, Any]:
    roles = ("system", "developer")
    messages = [{"role": roles[i % 2], "content": f"Rule {i}."} for i in range(asked.systems)]
    body: dict[str, Any] = {"messages": [*messages, *_later(asked)]}
    body["tools"] = [
        {"type": "function", "function": {"name": n, "parameters": CITY}} for n in asked.tools
    ]
    body["tool_choice"] = _openai_choice(asked, lambda name: {"function": {"name": name}})
    formats: dict[str, Any] = {
        "": None,
        "text": {"type": "text"},
        "object": {"type": "json_object"},
    }
    named = {"type": "json_schema", "json_schema": {"name": "city", "schema": _schema(asked)}}
    return {**body, "response_format": formats.get(asked.format, named)}


def _responses(asked: Asked) -> dict[str, Any]:
    messages = [{"role": "developer", "content": f"Rule {i}."} for i in range(1, asked.systems)]
    body: dict[str, Any] = {"input": [*messages, *_later(asked)]}
    if asked.systems:
        body["instructions"] = "Rule 0."
    body["tools"] = [{"type": "function", "name": n, "parameters": CITY} for n in asked.tools]
    body["tool_choice"] = _openai_choice(asked, lambda name: {"name": name})
    formats: dict[str, Any] = {
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "object": {"format": {"type": "json_object"}},
        "": None,
    }
    named = {"format": {"type": "json_schema", "name": "city", "schema": _schema(asked)}}
    return {**body, "text": formats.get(asked.format, named)}


def _messages(asked: Asked) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": _later(asked), "max_tokens": 99}
    # A list of blocks is one message; what comes first in messages is another.
    if asked.systems:
        body["system"] = [{"type": "text", "text": "Rule 0."}]
    first = [{"role": "system", "content": f"Rule {i}."} for i in range(1, asked.systems)]
    body["messages"] = [*first, *body["messages"]]
    body["tools"] = [{"name": n, "input_schema": CITY} for n in asked.tools]
    types = {"auto": "auto", "none": "none", "required": "any"}
    name = asked.tools[-1] if asked.choice == "named" and asked.tools else "unknown"
    choice = {"type": types.get(asked.choice, "tool")}
    body["tool_choice"] = {**choice, "name": name} if choice["type"] == "tool" else choice
    if asked.format not in ("", "text"):
        schema = {"type": "object"} if asked.format == "object" else _schema(asked)
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    return body


_BODIES = {"chat": _chat, "responses": _responses, "messages": _messages}


def _openai_choice(asked: Asked, named: Any) -> Any:
    if asked.choice in ("auto", "none", "required"):
        return asked.choice
    name = asked.tools[-1] if asked.choice == "named" and asked.tools else "unknown"
    return {"type": "function", **named(name)}


def _later(asked: Asked) -> Sequence[dict[str, Any]]:
    messages = [{"role": "user", "content": "Where?"}]
    if not asked.later_system:
        return messages
    return [*messages, {"role": "system", "content": "Later rule."}, *messages]


_WORLDS: dict[bool, tuple[World, TeacherServer]] = {}
_STACK = AsyncExitStack()


async def _world(*, is_strict: bool) -> tuple[World, TeacherServer]:
    """A system with that chat template, for all inputs."""
    if not _WORLDS:
        atexit.register(lambda: run(_STACK.aclose()))
    if is_strict not in _WORLDS:
        folder = Path(tempfile.mkdtemp())
        template = (STRICT if is_strict else "") + FAMILY.chat_template
        model = replace(FAMILY, chat_template=template).make_model(folder / "model")
        _WORLDS[is_strict] = await _STACK.enter_async_context(taught_world(folder, model))
    return _WORLDS[is_strict]


_ASKED = st.builds(
    Asked,
    dialect=st.sampled_from(sorted(PATHS)),
    choice=st.sampled_from(["auto", "auto", "none", "required", "named", "unknown"]),
    tools=st.sampled_from([(), ("city",), ("city", "town")]),
    format=st.sampled_from(["", "", "text", "object", "schema", "scalar", "broken"]),
    systems=st.integers(0, 3),
    later_system=st.sampled_from([False, False, False, True]),
    is_strict=st.booleans(),
    stream=st.booleans(),
)
KINDS = (
    Kind(
        name="agent requests",
        check=check_asked,
        examples=[
            *(Asked(dialect, "required", ("city", "town")) for dialect in PATHS),
            *(Asked(dialect, "named", ("city",)) for dialect in PATHS),
            *(Asked(dialect, format="schema") for dialect in PATHS),
            *(Asked(dialect, systems=2, is_strict=True) for dialect in PATHS),
            *(Asked(dialect, systems=1, later_system=True, is_strict=True) for dialect in PATHS),
            Asked("responses", format="text"),
        ],
        generated=_ASKED,
        short=12,
        long=1000,
    ),
)
