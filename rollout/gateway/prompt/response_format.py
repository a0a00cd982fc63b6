"""Response formats: from the text of an answer to content, reasoning and tool calls.

A format is a response template of `transformers.utils.chat_parsing`. It comes from the setting
`response_format`, from the tokenizer, or is chosen by the markers in the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.chassis.errors import ConfigError

__all__ = ["Answer", "ResponseFormat", "load_response_format"]

_ANY_START = r"\A"
_END = r"<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|</s>|$"
_REASONING = {"open": "<think>", "close": "</think>"}
_JSON_CALL = {"type": "function", "function": "{content}"}

# Content may come in pieces, before and after tool calls.
_CONTENT = {"close_pattern": _END, "repeats": True, "join": "\n"}

BUILT_IN: dict[str, dict[str, Any]] = {
    # Qwen 2.5 and 3, Hermes: <tool_call>{"name": …, "arguments": {…}}</tool_call>
    "hermes": {
        "reasoning_content": _REASONING,
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": _JSON_CALL,
        },
        "content": _CONTENT,
    },
    # Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
    "qwen3_coder": {
        "reasoning_content": _REASONING,
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": _CONTENT,
    },
    # Llama 3.1 and later: a JSON object {"name": …, "parameters": {…}} instead of content.
    "llama3": {
        "tool_calls": {
            "open_pattern": r'\A\s*(?:<\|python_tag\|>)?\s*(?=\{\s*"name")',
            "close_pattern": _END,
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        },
        "content": _CONTENT,
    },
    # Mistral: [TOOL_CALLS] and a JSON list.
    "mistral": {
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "close_pattern": _END,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{arguments}"},
            },
            "transform_each": True,
        },
        "content": _CONTENT,
    },
    # DeepSeek R1 and others that only think.
    "reasoning": {"reasoning_content": _REASONING, "content": _CONTENT},
    "text": {"content": {}},
}
"""Fields of each format by name."""

_MARKERS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3"),
    ("<think>", "reasoning"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed answer."""

    message: Mapping[str, Any]
    """As chat templates take it: role, content, reasoning_content, tool_calls."""
    error: str = ""
    """Why it could not be parsed; its content then is the whole text."""


class ResponseFormat:
    """Parses the answers of one model."""

    def __init__(self, template: Mapping[str, Any], special_tokens: Sequence[str] = ()) -> None:
        """`special_tokens` are left out of content."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._template = load_response_template(dict(template))
        self._special = re.compile("|".join(map(re.escape, special_tokens)) or r"(?!)")
        fields = self._template.fields
        self.parses_tool_calls = "tool_calls" in fields
        """Whether it knows tool calls."""
        self.parses_reasoning = bool({"reasoning_content", "thinking"} & set(fields))
        """Whether it knows reasoning."""
        self.is_plain = set(fields) == {"content"}
        """Whether an answer is its text."""
        self._takes_header = template.get("start_anchor_pattern") != _ANY_START

    def parse(self, text: str, prompt_end: str, tools: Sequence[Mapping[str, Any]] = ()) -> Answer:
        """Parse an answer, special tokens included.

        `prompt_end` is what the template wrote after the last message: the header of the answer,
        and maybe the opening tag of its reasoning.
        """
        if self.is_plain:
            return Answer(self._plain(text))
        if not self._takes_header:
            is_open = prompt_end.rstrip().endswith(_REASONING["open"])
            prompt_end = _REASONING["open"] if is_open else ""
        from transformers.utils.chat_parsing import parse_response

        try:
            parsed = parse_response(
                text, self._template, prefix=prompt_end, tools=[dict(t) for t in tools]
            )
            return Answer(self._message(parsed))
        except (ValueError, KeyError, TypeError) as error:
            return Answer(self._plain(text), " ".join(str(error).split())[:400])

    def _message(self, parsed: Mapping[str, Any]) -> dict[str, Any]:
        message = self._plain(parsed.get("content") or "")
        message["content"] = message["content"].strip()
        reasoning = parsed.get("reasoning_content") or parsed.get("thinking")
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls := parsed.get("tool_calls"):
            message["tool_calls"] = [_checked_call(call, i) for i, call in enumerate(calls)]
        return message

    def _plain(self, text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": self._special.sub("", text)}


def _checked_call(call: Any, index: int) -> dict[str, Any]:
    """A call with an id.

    Raises:
        ValueError: it has no name, or its arguments are no object.
    """
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments", {}) if isinstance(function, dict) else None
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError(f"tool call {index} is {json.dumps(call)[:80]}: no name with arguments")
    return {
        "id": call.get("id") or f"call_{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def load_response_format(
    name: str, tokenizer: Any, special_tokens: Sequence[str] = ()
) -> ResponseFormat:
    """The format of setting `response_format`: "auto", a built-in name or a JSON file.

    Raises:
        ConfigError: an unknown name, or a file that holds no response template.
    """
    template = getattr(tokenizer, "response_template", None) if name == "auto" else None
    if template is not None:
        return ResponseFormat(template, special_tokens)
    if name == "auto":
        markers = (known for marker, known in _MARKERS if marker in (tokenizer.chat_template or ""))
        name = next(markers, "text")
    if name in BUILT_IN:
        fields = {"start_anchor_pattern": _ANY_START, "fields": BUILT_IN[name]}
        return ResponseFormat(fields, special_tokens)
    return _from_file(name, special_tokens)


def _from_file(name: str, special_tokens: Sequence[str]) -> ResponseFormat:
    if not name.endswith(".json"):
        known = ", ".join(sorted(BUILT_IN))
        raise ConfigError(f"response_format is {name!r}: give auto, {known}, or a .json file")
    try:
        return ResponseFormat(json.loads(Path(name).read_text("utf-8")), special_tokens)
    except (OSError, ValueError) as error:
        raise ConfigError(f"response_format {name!r}: {error}") from error
