"""Response templates of the model families, as data: how their policies write an answer.

Their form is that of `transformers.utils.chat_parsing`. Regions are content, reasoning_content and
tool_calls; what no marker opens is content. Chosen by markers in the chat template.

No pattern looks beyond the next "<" or "[", or further than a bound: an answer takes time in
proportion to its length, whatever a policy writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = dict[str, dict[str, Any]]

_END = r"<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|</s>|<｜end▁of▁sentence｜>"
_SPACE = r"\s{0,32}"
_CONTENT = {"close_pattern": _END}
_THINK = {"open": "<think>", "close": "</think>"}
_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""A call whose name is in its opening marker and whose content is the arguments."""
_LISTED = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
_WHOLE = {"type": "function", "function": "{content}"}
"""A call whose content is an object with its name and arguments, or parameters."""

_DEEPSEEK_NAME = (
    r"(?:function<｜tool▁sep｜>(?P<name>[^\n<]{1,128})\n```json\n"
    r"|(?!function<｜tool▁sep｜>)(?P<name>[^\n<]{1,128})<｜tool▁sep｜>)"
)
_HARMONY_START = r"(?:<\|start\|>assistant)?"
_HARMONY_END = r"<\|end\|>|<\|return\|>"
_HARMONY_TYPE = r"[^<]{0,64}(?:<\|constrain\|>\w{1,32}" + _SPACE + r")?<\|message\|>"

BUILT_IN: Mapping[str, Fields] = {
    # Qwen 2.5 and 3, Hermes: <tool_call>{"name": …, "arguments": {…}}</tool_call>
    "hermes": {
        "reasoning_content": _THINK,
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": _WHOLE,
        },
        "content": _CONTENT,
    },
    # Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
    # and at times without <tool_call>. As in SGLang and vLLM the next parameter ends one, too.
    "qwen3_coder": {
        "reasoning_content": _THINK,
        "tool_calls": {
            "open_pattern": rf"(?:<tool_call>{_SPACE})?<function=(?P<name>[^<>\n]{{1,128}})>",
            "close_pattern": rf"(?P<end></function>)(?:{_SPACE}</tool_call>)?",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^<>\n]{1,128})>\n?"
                r"(?P<value>(?:[^<\n]++|(?!\n?(?:</parameter>|<parameter=|\Z)).)*+)"
                r"\n?(?:</parameter>|(?=<parameter=)|\Z)"
            },
            "transform": {**_FUNCTION, "end": "{end}"},  # it has one, or it is cut
        },
        "content": _CONTENT,
    },
    # Llama 3.1 and later: a JSON object {"name": …, "parameters": {…}} instead of content, at times
    # with "type": "function"; or after <|python_tag|>.
    "llama3": {
        "tool_calls": {
            "open_pattern": rf"(?:\A{_SPACE}|<\|python_tag\|>{_SPACE})"
            rf'(?=\{{{_SPACE}"(?:name|parameters|arguments|type"{_SPACE}:{_SPACE}"function)")',
            "close_pattern": _END,
            "repeats": True,
            "content": "json",
            "transform": _WHOLE,
        },
        "content": _CONTENT,
    },
    # Mistral: [TOOL_CALLS] and a JSON list of calls.
    "mistral": {
        "reasoning_content": {"open": ["[THINK]", "<think>"], "close": ["[/THINK]", "</think>"]},
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "close_pattern": _END,
            "repeats": True,
            "content": "json",
            "transform": _LISTED,
            "transform_each": True,
        },
        "content": _CONTENT,
    },
    # Mistral from 2025 on: [TOOL_CALLS]name[ARGS]{…}, once for each call.
    "mistral_args": {
        "reasoning_content": {"open": ["[THINK]", "<think>"], "close": ["[/THINK]", "</think>"]},
        "tool_calls": {
            "open_pattern": rf"\[TOOL_CALLS\]{_SPACE}(?P<name>[\w.-]{{1,128}})"
            r"(?:\[CALL_ID\]\w{1,64})?\[ARGS\]",
            "close_pattern": _END + r"|(?=\[TOOL_CALLS\])",
            "repeats": True,
            "content": "json",
            "transform": _FUNCTION,
        },
        "content": _CONTENT,
    },
    # DeepSeek V3, R1 (arguments in a block of code) and V3.1 (arguments alone).
    "deepseek": {
        "reasoning_content": _THINK,
        "tool_calls": {
            "open_pattern": rf"(?:<｜tool▁calls▁begin｜>{_SPACE})?<｜tool▁call▁begin｜>"
            + _DEEPSEEK_NAME,
            "close_pattern": rf"(?:```{_SPACE})?<｜tool▁call▁end｜>"
            rf"(?:{_SPACE}<｜tool▁calls▁end｜>)?",
            "repeats": True,
            "content": "json",
            "transform": _FUNCTION,
        },
        "content": _CONTENT,
    },
    # gpt-oss: channels. analysis is reasoning, a recipient functions.NAME is a call, the rest is
    # content; a header that opens content is read as the end of an empty piece of it.
    "harmony": {
        "reasoning_content": {
            "open_pattern": _HARMONY_START + r"<\|channel\|>analysis" + _SPACE + r"<\|message\|>",
            "close_pattern": _HARMONY_END,
        },
        "tool_calls": {
            "open_pattern": _HARMONY_START
            + r"(?:\s?to=functions\.(?P<name>[\w.-]{1,128})<\|channel\|>(?:commentary|analysis)"
            + r"|<\|channel\|>(?:commentary|analysis)\s{1,32}"
            + r"to=functions\.(?P<name>[\w.-]{1,128}))"
            + _HARMONY_TYPE,
            "close_pattern": r"<\|call\|>|" + _HARMONY_END,
            "repeats": True,
            "content": "json",
            "transform": _FUNCTION,
        },
        "content": {
            "close_pattern": _HARMONY_START
            + rf"<\|channel\|>(?:final|commentary){_SPACE}"
            + rf"(?:<\|constrain\|>\w{{1,32}}{_SPACE})?<\|message\|>|"
            + _HARMONY_END
        },
    },
    # Models that only think.
    "reasoning": {"reasoning_content": _THINK, "content": _CONTENT},
    "text": {"content": {}},
}

MARKERS = (
    ("<|channel|>", "harmony"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<function=", "qwen3_coder"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary of argument name', "llama3"),
    ("<think>", "reasoning"),
)
"""Text of a chat template and the format that it tells of; the first one found counts."""
