"""Calls of agents: equal and repeated ones, stop strings, prompts, and how answers are read.

The right values come from other readings: a decoder of one token at a time, transformers' own
`apply_chat_template`, and the calls that an answer was written from.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from seamflow.client.messages import to_messages
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from bench.harness.byte_model import APPENDING, make_byte_model
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.prompt import Prompt
from rollout.gateway.prompt.token_text import StopStrings
from services.chassis.errors import ServiceError
from tests.lib.rollout.gateway.tools import TOOLS
from tests.suites.agents.equal_calls import figures
from tests.suites.field.kind import Kind
from tests.suites.parsers.answers import FORMATS, Asked, asked
from tests.suites.parsers.differences import is_right
from tests.suites.parsers.verdicts import ours
from tests.suites.roundtrips.families import FAMILIES

USER, NEXT = {"role": "user", "content": "say"}, {"role": "user", "content": "and now?"}
CALL = {"id": "000000000", "function": {"name": "city", "arguments": {"name": "Ulm"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "000000000", "name": "city", "content": "rain"}
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
CITY = {"type": "function", "function": {"name": "city", "description": "", "parameters": _SCHEMA}}
TEMPLATES = {
    "plain": APPENDING,
    "tools": TOOLS,
    "no calls": TOOLS.replace("m.tool_calls or []", "[]"),
    "no results": TOOLS.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
    ),
}
PARTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "tools": [USER],
    "tool_calls": [USER, CALLED, NEXT],
    "tool": [USER, CALLED, TOLD, NEXT],
}


@cache
def _folder(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="seamflow-calls-"))
    if name in TEMPLATES:
        return make_byte_model(folder, TEMPLATES[name])
    return FAMILIES[name].make_model(folder, falls_back=name == "mistral")


@cache
def _template(name: str) -> ChatTemplate:
    return ChatTemplate(_folder(name))


@cache
def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_folder(name))


def _by_transformers(name: str, messages: Sequence[Any], **options: Any) -> str:
    """The text that transformers renders; of arguments as the template takes them."""
    taken = [_template(name)._as_template_takes(message) for message in messages]
    text: str = _tokenizer(name).apply_chat_template(taken, tokenize=False, **options)
    return text


async def _check_equal_calls(case: tuple[int, int]) -> None:
    found = await figures(*case)
    right = {
        "different_samples": case[0],
        "copies": 0,
        "not_received": 0,
        "repeated_right": case[1],
    }
    assert found.items() >= right.items(), found


def first_stop(
    template: ChatTemplate, stops: Sequence[str], ids: Sequence[int]
) -> tuple[int | None, str]:
    """Token by token: how many it takes to a stop string, and the text before it."""
    start = 0
    for number in range(1, len(ids) + 1):
        if ids[number - 1] in template.marker_ids:
            start = number
        text = template.text(ids[start:number])
        if found := [text.index(stop) for stop in stops if stop in text]:
            return number, template.text(ids[:start]) + text[: min(found)]
    return None, template.text(ids)


def _check_stops(case: tuple[str, str, int, str, int]) -> None:
    name, text, place, stop, size = case
    template = _template(name)
    end = min(template.stop_token_ids)
    ids = [*template.encode_text(text[:place]), *template.encode_text(text[place:]), end]
    strings, start = StopStrings(template, [stop]), 0
    found = None
    while start < len(ids) and found is None:
        found = strings.num_until_next(ids[start : start + size])
        found, start = None if found is None else start + found, start + size
    assert (found, strings.text_before(ids)) == first_stop(template, [stop], ids)
    assert found is None or stop in text


def _parsed(name: str, messages: Sequence[Any], tools: Sequence[Any] = (), **fields: Any) -> Prompt:
    given = pb.GenerateRequest(messages=to_messages(messages, tools), **fields)
    return Prompt.parse(given, _template(name), "as_sampled")


def _check_parts(case: tuple[str, str]) -> None:
    """Refused where transformers renders the same with and without; else rendered alike."""
    name, part = case
    messages = PARTS[part]
    tools = [CITY] if part == "tools" or name not in TEMPLATES else []
    options = {"tools": tools or None, "add_generation_prompt": True}
    text = _by_transformers(name, messages, **options)
    shown = {"tools": "city" in text, "tool_calls": "Ulm" in text, "tool": "rain" in text}
    needed = ["tools"] * bool(tools) + {"tools": [], "tool_calls": ["tool_calls"]}.get(
        part, ["tool_calls", "tool"]
    )
    try:
        prompt = _parsed(name, messages, tools)
    except ServiceError as error:
        assert "does not render" in error.message
        assert not all(shown[each] for each in needed), error.message
        return
    assert all(shown[each] for each in needed), f"{needed} are left out"
    assert prompt.conversation is not None
    assert prompt.template.render(prompt.conversation) == text


_NO_REASONING = "<think>\n\n</think>\n\n"


def _check_begun(case: tuple[str, str]) -> None:
    """The prompt is transformers' with continue_final_message, or the call is refused.

    Where the prompt opens reasoning it is closed first, as the family writes none.
    """
    name, text = case
    messages = [USER, {"role": "assistant", "content": text}]
    try:
        prompt = _parsed(name, messages)
    except ServiceError:
        assert text != text.rstrip() or not text, "it can be continued"
        return
    assert prompt.conversation is not None
    whole = prompt.template.render(prompt.conversation) + prompt.constraint.opening
    theirs = _by_transformers(name, messages, continue_final_message=True)
    assert whole.replace(_NO_REASONING, "") == theirs.replace(_NO_REASONING, "")


def _check_none(name: str) -> None:
    """The same prompt as with "auto", and content alone."""
    template = _template(name)
    auto = _parsed(name, [USER], [CITY])
    none = _parsed(name, [USER], [CITY], tool_choice=pb.ToolChoice(none=True))
    assert auto.ids == none.ids
    assert auto.fingerprint == none.fingerprint
    written = _by_transformers(name, [USER, CALLED], tools=[CITY])
    before = template.render(auto.conversation) if auto.conversation else ""
    if not written.startswith(before):
        return
    ids = template.encode_text(written[len(before) :])
    assert auto.parse_answer(ids, None).message.get("tool_calls")
    answer = none.parse_answer(ids, None)
    assert not answer.message.get("tool_calls")
    assert "Ulm" in answer.message["content"]


def _check_observation(case: tuple[Mapping[str, Any], str]) -> None:
    """Content that is no text is named; text is taken as it is."""
    message, named = case
    try:
        (found,) = to_messages([message]).messages
    except ValueError as error:
        assert named, error
        assert named in str(error)
        return
    assert not named, "accepted"
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    assert "".join(part.text for part in found.content) == "".join(texts)


def _check_calls(case: Asked | tuple[str, str, Sequence[Any] | None]) -> None:
    """The calls that were written, or the whole answer as content with an error."""
    if not isinstance(case, Asked):
        case = Asked(*case)
    found = ours(case)
    assert is_right(case, found), found
    if case.right is None and not found["calls"]:
        assert found["content"].strip() == case.text.strip(), found


_STOPS = st.sampled_from(["<", ">", "|>", "end", "o", "学", "ö", " w", "k <e"])
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
_TEXT = {"type": "text", "text": "look"}
F_OF_1 = [("f", {"a": 1})]
_KEYS = ("images", "image", "audio", "video", "function_call", "is_error", "refusal")

KINDS = (
    Kind(
        name="equal and repeated calls",
        check=_check_equal_calls,
        examples=[(24, 3)],
        generated=st.tuples(st.integers(17, 80), st.integers(1, 12)),
        short=0,
        long=3,
    ),
    Kind(
        name="stop strings",
        check=_check_stops,
        examples=[
            ("tools", "ok <e", 2, "o", 3),
            ("tools", "ok <e", 2, "end", 1),
            ("mistral", "数学 and 学", 1, "学", 100),
        ],
        generated=st.tuples(
            st.sampled_from(["tools", "mistral", "hermes"]),
            st.text("ok <end|>wö学😀", max_size=24),
            st.integers(0, 24),
            _STOPS,
            st.integers(1, 30),
        ),
    ),
    Kind(
        name="parts of prompts",
        check=_check_parts,
        examples=[(name, part) for name in TEMPLATES for part in PARTS],
        generated=st.tuples(st.sampled_from(sorted(FAMILIES)), st.sampled_from(sorted(PARTS))),
        long=100,
    ),
    Kind(
        name="begun answers",
        check=_check_begun,
        examples=[(name, "The sum is") for name in (*TEMPLATES, *FAMILIES)],
        generated=st.tuples(
            st.sampled_from(sorted(FAMILIES)), st.text("ab {:\n\"'€", min_size=1, max_size=9)
        ),
        long=300,
    ),
    Kind(
        name="calls that are not wanted",
        check=_check_none,
        examples=sorted(FAMILIES),
    ),
    Kind(
        name="content that is no text",
        check=_check_observation,
        examples=[
            ({"role": "user", "content": [_TEXT, _IMAGE]}, "messages[0].content[1]"),
            ({"role": "tool", "content": [{"type": "image", "data": "AA=="}]}, "content[0]"),
            ({"role": "user", "content": ["look"]}, "content[0]"),
            ({"role": "user", "content": [{"type": "text"}]}, "content[0]"),
            *(({"role": "user", "content": "a", key: ["x"]}, f"[0].{key}") for key in _KEYS),
            *(({"role": "user", "content": "a", key: None}, "") for key in _KEYS),
            ({"role": "user", "content": [_TEXT, _TEXT]}, ""),
        ],
        generated=st.builds(
            lambda parts, at: (
                {"role": "user", "content": [*parts[:at], _IMAGE, *parts[at:]]},
                f"content[{min(at, len(parts))}]",
            ),
            st.lists(st.just(_TEXT), max_size=3),
            st.integers(0, 3),
        ),
        long=50,
    ),
    Kind(
        name="tool calls of each format",
        check=_check_calls,
        examples=[
            ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', F_OF_1),
            ("llama3", '{"type": "function", "name": "f", "parameters": {"a": 1}}', F_OF_1),
            ("hermes", '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>', None),
            ("qwen3_coder", "<tool_call><function=f>" + "<parameter=city>" * 4_000, None),
        ],
        generated=st.builds(
            lambda name, seed, number: [*asked(name, 1, 3, seed)][:number][-1],
            st.sampled_from(sorted(FORMATS)),
            st.integers(0, 1_000_000),
            st.integers(1, 4),
        ),
        short=30,
    ),
)
