"""Answers are parsed by the format of their model; what cannot be parsed stays text."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.gateway.prompt.model_families import BUILT_IN
from rollout.gateway.prompt.response_format import ResponseFormat, load_response_format
from services.chassis.errors import ConfigError

SPECIAL = ["<|im_end|>", "</s>", "<|eot_id|>"]


def format_of(name: str, template: str = "") -> ResponseFormat:
    """A format as the gateway loads it."""
    return load_response_format(name, SimpleNamespace(chat_template=template), SPECIAL)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A parsed tool call, without its id."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def calls_of(message: Any) -> list[dict[str, Any]]:
    """The calls without ids; each has one, all different."""
    calls = message.get("tool_calls", [])
    assert len({each["id"] for each in calls}) == len(calls)
    return [{key: value for key, value in each.items() if key != "id"} for each in calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        (
            "hermes",
            'Sure.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {}}</tool_call><|im_end|>',
            "Sure.",
            [call("f", a=1), call("g")],
        ),
        (
            "qwen3_coder",
            "Sure.\n<tool_call>\n<function=f>\n<parameter=a>\nx y\n</parameter>\n</function>\n"
            "</tool_call><|im_end|>",
            "Sure.",
            [call("f", a="x y")],
        ),
        (
            "llama3",
            '{"name": "f", "parameters": {"a": 1}}<|eot_id|>',
            "",
            [call("f", a=1)],
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}},'
            ' {"name": "g", "arguments": {}}]</s>',
            "",
            [call("f", a=1), call("g")],
        ),
        ("llama3", "I have no tool.<|eot_id|>", "I have no tool.", []),
        ("hermes", "plain<|im_end|>", "plain", []),
        ("text", "plain<|im_end|>", "plain", []),
    ],
)
def test_calls_become_structure(
    name: str, text: str, content: str, calls: list[dict[str, Any]]
) -> None:
    """Names and arguments as parsed JSON; the content is what remains."""
    answer = format_of(name).parse(text, "")
    assert answer.error == ""
    assert answer.message["content"] == content
    assert calls_of(answer.message) == calls


@pytest.mark.parametrize("prompt_end", ["", "<|im_start|>assistant\n"])
def test_reasoning_is_apart_from_content(prompt_end: str) -> None:
    """The policy has opened and closed its reasoning."""
    message = format_of("hermes").parse("<think>\nhm\n</think>\n\n4<|im_end|>", prompt_end).message
    assert (message["reasoning_content"], message["content"]) == ("hm", "4")


def test_reasoning_that_the_template_has_opened_is_found() -> None:
    """Templates of reasoning models end the prompt with the opening tag."""
    end = "<|im_start|>assistant\n<think>\n"
    message = format_of("reasoning").parse("hm</think>4", end).message
    assert (message["reasoning_content"], message["content"]) == ("hm", "4")
    # Control: without the prompt's end the same text has no reasoning.
    assert "reasoning_content" not in format_of("reasoning").parse("hm</think>4", "").message


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": </tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "<tool_call>[1, 2]</tool_call>",
    ],
)
def test_a_malformed_call_stays_text(text: str) -> None:
    """The policy is told by its environment, not by an exception of the gateway."""
    answer = format_of("hermes").parse(f"Sure. {text}<|im_end|>", "")
    assert answer.message == {"role": "assistant", "content": f"Sure. {text}"}
    assert answer.error


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call><function=' }}", "qwen3_coder"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("{{ '<think>' }}", "reasoning"),
        ("{{ messages }}", "text"),
    ],
)
def test_auto_goes_by_the_markers_of_the_template(template: str, name: str) -> None:
    """The first marker that is found decides."""
    chosen = format_of("auto", template)
    assert chosen.name == name
    assert chosen.parses_tool_calls == ("tool_calls" in BUILT_IN[name])


def test_the_tokenizers_own_template_comes_first(tmp_path: Path) -> None:
    """Models that ship one need no setting; a file is the third way."""
    own = {"start_anchor": "<a>", "fields": {"reasoning_content": {"open": "(", "close": ")"}}}
    own["fields"]["content"] = {}  # type: ignore[index]
    tokenizer = SimpleNamespace(chat_template="<tool_call>", response_template=own)
    (tmp_path / "own.json").write_text(json.dumps(own))
    for loaded in (
        load_response_format("auto", tokenizer, SPECIAL),
        load_response_format(str(tmp_path / "own.json"), tokenizer, SPECIAL),
    ):
        message = loaded.parse("hm)4", "<user>hi<a>(").message
        assert (message["reasoning_content"], message["content"]) == ("hm", "4")


@pytest.mark.parametrize("name", ["herms", "nowhere.json"])
def test_an_unknown_format_is_named(name: str) -> None:
    """At start."""
    with pytest.raises(ConfigError, match=name):
        format_of(name)
