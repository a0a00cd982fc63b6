"""Tool calls that the agent forces: messages x chat templates x ways to force.

The right values come from how each family's policy writes a call: what follows the beginning that
the gateway has put into the prompt.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.constraint.constraint import Constraint
from rollout.gateway.prompt.conversation import answer_message, parse_conversation
from tests.suites.field.kind import Kind
from tests.suites.roundtrips.client import echoed, said_by
from tests.suites.roundtrips.families import FAMILIES
from tests.suites.roundtrips.model_family import Said, json_text
from tests.suites.roundtrips.policy import TOOLS, Marks, sampled_ids
from tests.suites.roundtrips.recorded_gateway import RecordedGateway
from tests.suites.roundtrips.round_trip import TOOL_MESSAGES

# Of each family: what a policy writes between the tool's name and its arguments, and after these.
_FORMS = {
    "hermes": ('", "arguments": ', "}\n</tool_call>"),
    "qwen3": ('", "arguments": ', "}\n</tool_call>"),
    "qwen3_opened": ('", "arguments": ', "}\n</tool_call>"),
    "qwen3_coder": (">\n", "</function>\n</tool_call>"),
    "llama3": ('", "parameters": ', "}"),
    "mistral": ('", "arguments": ', "}]"),
    "mistral_args": ("[ARGS]", ""),
    "deepseek_r1": ("\n```json\n", "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁sep｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "deepseek_v31_text": ("<｜tool▁sep｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "harmony": (" <|constrain|>json<|message|>", ""),
}
_ENDS = {"harmony": "<|call|>", "llama3": "<|eom_id|>"}


@dataclass(frozen=True, slots=True)
class Forced:
    """One forced call."""

    family: str
    is_named: bool
    tool: str
    arguments: Mapping[str, Any]
    is_cut: bool
    seed: int


@cache
def _template(family: str) -> ChatTemplate:
    return ChatTemplate(FAMILIES[family].make_model(Path(tempfile.mkdtemp())))


async def check_forced(forced: Forced) -> None:
    """Parsed as the call, or content if it is cut; recorded as environment; continued."""
    rng = random.Random(forced.seed)
    template, family = _template(forced.family), FAMILIES[forced.family]
    gateway = RecordedGateway(template, "as_sampled")
    await gateway.start()
    messages = [said_by("system", "Be brief."), said_by("user", Marks().text(rng))]
    choice = pb.ToolChoice(name=forced.tool) if forced.is_named else pb.ToolChoice(required=True)
    given = pb.Messages(messages=messages, tools=TOOL_MESSAGES)
    free = template.encode(parse_conversation(given))
    record = await gateway.begin("t0", given, tool_choice=choice)
    sampled = _continuation(forced, rng)
    ids = sampled_ids(template, family, sampled, rng)
    await gateway.end(record, ids, has_stopped=not forced.is_cut)
    _check_record(gateway, record.prompt_ids, free, ids)
    constraint = Constraint(calls_tool=True, tool=forced.tool if forced.is_named else "")
    verdict = constraint.tool_check(record.answer)
    assert verdict is not None
    calls = record.answer.message.get("tool_calls", [])
    if forced.is_cut:
        shown = _bare(record.answer.message["content"], family.special)
        begun = template.text([*record.prompt_ids[len(free) :], *ids])
        assert verdict.result == pb.CHECK_RESULT_INVALID
        assert not calls
        assert _bare(sampled, family.special) in shown
        assert shown in _bare(begun, family.special)
    else:
        assert verdict.result == pb.CHECK_RESULT_VALID, verdict.reason
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
            (forced.tool, forced.arguments)
        ]
    answer = answer_message(record.answer.message)
    results = [said_by("tool", "3", tool_call_id=c.id, name=c.name) for c in answer.tool_calls]
    later = [*messages, *echoed(answer, rng), *(results or [said_by("user", "Go on.")])]
    second = await gateway.begin("t1", pb.Messages(messages=later, tools=TOOL_MESSAGES))
    whole = [*record.prompt_ids, *ids]
    assert second.prefix_turn_id == "t0"
    assert list(second.prompt_ids[: len(whole)]) == whole


async def check_one_call(asked: Forced) -> None:
    """Of two calls the first one is kept with the text before it, and nothing after it."""
    rng = random.Random(asked.seed)
    template, family = _template(asked.family), FAMILIES[asked.family]
    gateway = RecordedGateway(template, "as_sampled")
    await gateway.start()
    given = pb.Messages(messages=[said_by("user", "?")], tools=TOOL_MESSAGES)
    sampling = tokens_pb2.SamplingParams(max_new_tokens=10_000)
    choice = pb.ToolChoice(one_call=True)
    record = await gateway.begin("t0", given, tool_choice=choice, sampling=sampling)
    calls = [(asked.tool, asked.arguments), ("search", {"query": "more"})]
    content = "Well." if family.calls_with_text else ""
    said = Said(content=content, calls=calls if family.max_calls > 1 else calls[:1])
    ids = sampled_ids(template, family, family.write(said, rng) + family.end_of(said), rng)
    assert record.answer_end is not None
    number = record.answer_end.num_until_end(ids)
    answer = template.parse(ids[:number], None, parse_conversation(given))
    assert not answer.error
    names = [call["function"]["name"] for call in answer.message["tool_calls"]]
    assert (names, answer.message["content"]) == ([asked.tool], content)
    rest = template.text(ids[number:]) if number is not None else ""
    assert ("more" in rest) == (family.max_calls > 1)


def _check_record(
    gateway: RecordedGateway, prompt: Any, free: list[int], sampled: list[int]
) -> None:
    """The opening follows the free prompt; all of it is environment, all that is sampled policy."""
    assert list(prompt[: len(free)]) == free
    assert len(prompt) > len(free)
    counts = {tokens_pb2.ORIGIN_ENVIRONMENT: 0, tokens_pb2.ORIGIN_POLICY: 0}
    for append in gateway.appended:
        for span in append.tokens.spans:
            counts[span.origin] += span.num_tokens
    assert counts == {
        tokens_pb2.ORIGIN_ENVIRONMENT: len(prompt),
        tokens_pb2.ORIGIN_POLICY: len(sampled),
    }


def _continuation(forced: Forced, rng: random.Random) -> str:
    """What a policy writes after the beginning that the prompt has."""
    between, after = _FORMS[forced.family]
    arguments = _written(forced, rng)
    if forced.is_named:
        # JSON's bracket follows white space, if any.
        before = "" if forced.family == "qwen3_coder" else rng.choice(["", " "])
        text = before + arguments + after
    else:
        text = forced.tool + between + arguments + after
    if forced.is_cut:  # within the arguments; a call in tags is one after any of its parameters
        end = len(text) - len(after) - 2
        return text[: end if forced.family == "qwen3_coder" else rng.randint(0, end)]
    return text + _ENDS.get(forced.family, FAMILIES[forced.family].special[0])


def _written(forced: Forced, rng: random.Random) -> str:
    if forced.family != "qwen3_coder":
        return json_text(dict(forced.arguments), rng)
    values = (
        f"<parameter={key}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
        for key, v in forced.arguments.items()
    )
    return "".join(values)


def _bare(text: str, special: Sequence[str]) -> str:
    """Without special tokens and white space, which answers do not show."""
    for token in special:
        text = text.replace(token, "")
    return "".join(text.split())


_VALUES = {
    "string": st.text(alphabet="abc xyz.é数", min_size=1, max_size=12).map(str.strip).filter(bool),
    "integer": st.integers(-(10**6), 10**6),
    "number": st.sampled_from([0.5, -2.25, 1e22]),
    "boolean": st.booleans(),
    "array": st.lists(st.integers(-9, 9), max_size=3),
    "object": st.dictionaries(st.sampled_from("abc"), st.none() | st.booleans(), max_size=3),
}


@st.composite
def _forced(draw: st.DrawFn) -> Forced:
    tool = draw(st.sampled_from(sorted(TOOLS)))
    keys = [key for key in TOOLS[tool] if draw(st.booleans())]
    return Forced(
        family=draw(st.sampled_from(sorted(FAMILIES))),
        is_named=draw(st.booleans()),
        tool=tool,
        arguments={key: draw(_VALUES[TOOLS[tool][key]]) for key in keys},
        is_cut=bool(keys) and draw(st.integers(0, 4)) == 0,
        seed=draw(st.integers(0, 2**32)),
    )


_SINGLE = [name for name in FAMILIES if name != "mistral"]
"""Families with markers around each call."""
_CITY = {"query": "Ulm", "limit": 3}
KINDS = (
    Kind(
        name="forced calls",
        check=check_forced,
        examples=[
            Forced(family, is_named, "search", _CITY, is_cut=False, seed=0)
            for family in FAMILIES
            for is_named in (False, True)
        ],
        generated=_forced(),
        short=30,
        long=1000,
    ),
    Kind(
        name="no parallel calls",
        check=check_one_call,
        examples=[Forced(f, False, "search", _CITY, is_cut=False, seed=0) for f in _SINGLE],
        generated=_forced().filter(lambda forced: forced.family in _SINGLE),
        short=10,
        long=500,
    ),
)
