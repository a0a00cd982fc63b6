"""Answers are parsed by the format of their model; what cannot be parsed stays text."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.gateway.prompt.answer.model_families import BUILT_IN
from rollout.gateway.prompt.answer.response_format import ResponseFormat, load_response_format
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
        ("qwen3_coder", "Sure.<function=f>\n</function>\n</tool_call>", "Sure.", [call("f")]),
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
        (
            "mistral_args",
            'Sure.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}</s>',
            "Sure.",
            [call("f", a=1), call("g")],
        ),
        (
            "deepseek",
            "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
            '```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n"
            "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Sure.",
            [call("f", a=1), call("g")],
        ),
        (
            "deepseek",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>",
            "",
            [call("f", a=1)],
        ),
        (
            "harmony",
            "<|channel|>commentary<|message|>Sure.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
            "Sure.",
            [call("f", a=1)],
        ),
        (
            "harmony",
            ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>',
            "",
            [call("f", a=1)],
        ),
        ("harmony", "<|channel|>final<|message|>Sure.<|return|>", "Sure.", []),
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
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call><function=f>x</function></tool_call>"),
        ("llama3", '{"name": "f", "parameters": [1]}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f"'),
        ("mistral_args", "[TOOL_CALLS]f[ARGS]{a}"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{<|call|>"),
    ],
)
def test_a_malformed_call_stays_text_in_every_format(name: str, text: str) -> None:
    """Its markup is content, and reasoning before it stays reasoning."""
    answer = format_of(name).parse(text, "")
    assert answer.error
    assert answer.message == {"role": "assistant", "content": text}
    thought = {"harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"}
    opening = thought.get(name, "<think>hm</think>")
    if format_of(name).parses_reasoning:
        assert format_of(name).parse(opening + text, "").message["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call><function=' }}", "qwen3_coder"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("{{ '[TOOL_CALLS][ARGS]' }}", "mistral_args"),
        ("{{ '<think><｜tool▁call▁begin｜>' }}", "deepseek"),
        ("{{ '<|channel|>' }}", "harmony"),
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


def test_without_a_template_the_special_tokens_tell() -> None:
    """Some models come with a tokenizer alone."""
    tokenizer = SimpleNamespace(chat_template=None)
    assert load_response_format("auto", tokenizer, ["<s>", "[TOOL_CALLS]"]).name == "mistral"
    assert load_response_format("auto", tokenizer, ["<s>"]).name == "text"


PLUGIN = {
    "start_anchor": "<a>",
    "fields": {"reasoning_content": {"open": "(", "close": ")"}, "content": {}},
}
"""A response template as a plug-in."""
NO_CONTENT = {"start_anchor": "<a>", "fields": {"reasoning_content": {"open": "("}}}
NO_TEXT = {"start_anchor": "<a>", "fields": {"content": {"content": "json"}}}
NO_FIELDS = {"start_anchor": "<a>", "fields": [1]}
BAD_PATTERN = {"start_anchor": "<a>", "fields": {"content": {"close_pattern": "("}}}
NO_ANCHOR: dict[str, Any] = {"fields": {"content": {}}}
NO_DICT = "hermes"


def test_a_plug_in_parses() -> None:
    """A dict of any module."""
    message = format_of(f"{__name__}:PLUGIN").parse("(hm)4", "<a>").message
    assert (message["reasoning_content"], message["content"]) == ("hm", "4")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("herms", "none of the known names"),
        ("nowhere.json", "No such file"),
        ("nowhere.module:PLUGIN", "No module named"),
        (f"{__name__}:PLUG", "did you mean 'PLUGIN'"),
        (f"{__name__}:NO_CONTENT", 'a field "content"'),
        (f"{__name__}:NO_TEXT", "must be text"),
        (f"{__name__}:NO_FIELDS", '"fields", an object of objects'),
        (f"{__name__}:BAD_PATTERN", "invalid close_pattern"),
        (f"{__name__}:NO_ANCHOR", "start_anchor"),
        (f"{__name__}:NO_DICT", "not a dict"),
    ],
)
def test_a_wrong_format_is_refused_at_start(name: str, problem: str) -> None:
    """With the setting, its value, what is wrong and what to give."""
    with pytest.raises(ConfigError) as caught:
        format_of(name)
    message = str(caught.value)
    assert message.startswith(f"response_format is {name!r}: ")
    assert problem in message
    assert "give auto, deepseek, harmony, hermes" in message
