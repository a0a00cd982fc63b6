"""What is streamed of an answer begins its parsed texts, however its tokens are cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.prompt.answer.answer_parser import Markers
from rollout.gateway.prompt.answer.response_format import Answer
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.prompt import Prompt, TurnTexts
from rollout.gateway.prompt.token_text import StopStrings
from tests.suites.roundtrips.client import said_by
from tests.suites.roundtrips.families import FAMILIES
from tests.suites.roundtrips.model_family import Said
from tests.suites.roundtrips.policy import Marks, random_said, sampled_ids, written
from tests.suites.roundtrips.round_trip import TOOL_MESSAGES

ANSWERS = 40
REQUEST = pb.GenerateRequest(messages=pb.Messages(messages=[said_by("user", "hello")]))


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer, as a turn samples and ends it."""

    prompt: Prompt
    ids: Sequence[int]
    stops: Sequence[str]
    answer: Answer

    def streamed(self, cuts: Sequence[int], received: int = 0) -> tuple[str, str, str]:
        """Text, content and reasoning of a stream with these cuts, from token `received` on."""
        texts = TurnTexts(self.prompt, self.stops)
        texts.push(self.ids[:received])
        whole, content, reasoning = "", "", ""
        edges = [received, *cuts, len(self.ids)]
        for start, end in pairwise(edges):
            text, delta = texts.push(self.ids[start:end], last=end == len(self.ids))
            whole, content = whole + text, content + delta.content
            reasoning += delta.reasoning
        return whole, content, reasoning

    def cuts(self, rng: random.Random, start: int = 0) -> list[int]:
        """Random places, often many."""
        places = range(start + 1, len(self.ids))
        return sorted(rng.sample(places, rng.randint(0, len(places)) if places else 0))

    def is_begun_by(self, content: str, reasoning: str) -> bool:
        """Whether the parsed texts begin with these."""
        message = self.answer.message
        texts = (message["content"], message.get("reasoning_content", ""))
        return bool(texts[0].startswith(content) and texts[1].startswith(reasoning))


def answers(name: str, folder: Path, *, falls_back: bool, stopping: bool) -> list[Sampled]:
    """Random answers of a family, some of them malformed or cut."""
    family, rng, marks = FAMILIES[name], random.Random(7), Marks()
    template = ChatTemplate(family.make_model(folder, falls_back=falls_back))
    prompt = Prompt.parse(REQUEST, template, "as_sampled")
    found = []
    for _ in range(ANSWERS):
        said = random_said(family, rng, marks)
        text, _ = written(family, said, rng)
        ids = sampled_ids(template, family, text, rng)
        stops = _stops(text, rng) if stopping else []
        strings = StopStrings(template, stops)
        ids = ids[: strings.num_until_stop(ids, 0)]
        answer = template.parse(ids, strings.found(ids), prompt.conversation)
        found.append(Sampled(prompt, ids, stops, answer))
    return found


def _stops(text: str, rng: random.Random) -> list[str]:
    """Parts of the text, in one way or another, and what only begins like one."""
    start = rng.randint(0, len(text))
    part = text[start : start + rng.randint(1, 9)]
    chosen = rng.choice([[part], [part + "~"], [part, part + "~", part[1:]]])
    return [string for string in chosen if string] or ["~"]


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    """A family."""
    return str(request.param)


@pytest.mark.parametrize("falls_back", [False, True], ids=["bytes", "letters"])
@pytest.mark.parametrize("stopping", [False, True], ids=["", "stops"])
def test_deltas_begin_the_parsed_texts(
    name: str, tmp_path: Path, falls_back: bool, stopping: bool
) -> None:
    """Also after a resume, which continues with what the tokens before it gave."""
    rng = random.Random(11)
    for each in answers(name, tmp_path, falls_back=falls_back, stopping=stopping):
        whole, content, reasoning = each.streamed(each.cuts(rng))
        assert whole == each.prompt.template.text(each.ids)
        assert each.is_begun_by(content, reasoning), (each.answer, content, reasoning)
        received = rng.randint(0, len(each.ids))
        first = each.streamed(each.cuts(rng))
        assert first == (whole, content, reasoning)  # however it was cut
        before = _until(each, received, rng)
        after = each.streamed(each.cuts(rng, received), received)
        joined = tuple(b + a for b, a in zip(before, after, strict=True))
        assert received == len(each.ids) or joined == first


def _until(each: Sampled, received: int, rng: random.Random) -> tuple[str, str, str]:
    """What a caller has got whose stream broke after `received` tokens."""
    texts = TurnTexts(each.prompt, each.stops)
    whole, content, reasoning = "", "", ""
    start = 0
    while start < received:
        end = min(start + rng.randint(1, 5), received)
        text, delta = texts.push(each.ids[start:end])
        whole, content = whole + text, content + delta.content
        reasoning, start = reasoning + delta.reasoning, end
    return whole, content, reasoning


def test_all_of_an_answer_is_streamed(name: str, tmp_path: Path) -> None:
    """When its last token has come, unless it has a tool call or was cut."""
    tried = 0
    for each in answers(name, tmp_path, falls_back=False, stopping=False):
        message = each.answer.message
        has_ended = each.ids and each.ids[-1] in each.prompt.template.stop_token_ids
        if has_ended and not ("tool_calls" in message or each.answer.error):
            tried += 1
            _, content, reasoning = each.streamed(range(1, len(each.ids)))
            assert content == message["content"]
            assert reasoning == message.get("reasoning_content", "")
    assert tried > 3


def test_undecided_text_that_is_sent_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without waiting, parts of stop strings are sent as content."""
    monkeypatch.setattr(Markers, "decided", lambda _, text: len(text))
    held = [
        each.is_begun_by(*each.streamed(range(1, len(each.ids)))[1:])
        for each in answers(name, tmp_path, falls_back=False, stopping=True)
    ]
    assert not all(held)


def test_a_malformed_call_leaves_the_reasoning(tmp_path: Path) -> None:
    """Streamed before the call was known to be malformed; the call is content."""
    family = FAMILIES["hermes"]
    template = ChatTemplate(family.make_model(tmp_path))
    prompt = Prompt.parse(REQUEST, template, "as_sampled")
    text = '<think>hm</think>Sure. <tool_call>{"name": "f"<|im_end|>'
    ids = template.encode_text(text)
    each = Sampled(prompt, ids, [], template.parse(ids, None, prompt.conversation))
    assert each.streamed(range(1, len(ids)))[1:] == ("Sure.", "hm")
    assert each.answer.message == {
        "role": "assistant",
        "reasoning_content": "hm",
        "content": 'Sure. <tool_call>{"name": "f"',
    }
    assert each.answer.error


def test_what_was_written_is_parsed(name: str, tmp_path: Path) -> None:
    """Content, reasoning and tool calls of each family, whatever its policy does with spaces."""
    family, rng, marks = FAMILIES[name], random.Random(3), Marks()
    template = ChatTemplate(family.make_model(tmp_path))
    prompt = Prompt.parse(_with_tools(), template, "as_sampled")
    for _ in range(ANSWERS):
        said = random_said(family, rng, marks)
        text = family.write(said, rng) + family.end_of(said)
        ids = sampled_ids(template, family, text, rng)
        answer = template.parse(ids, None, prompt.conversation)
        assert answer.error == ""
        assert _said(answer) == said, text


def _with_tools() -> pb.GenerateRequest:
    return pb.GenerateRequest(
        messages=pb.Messages(messages=[said_by("user", "hello")], tools=TOOL_MESSAGES)
    )


def _said(answer: Answer) -> Said:
    message = answer.message
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return Said(
        reasoning=message.get("reasoning_content", ""),
        content=message["content"],
        calls=[(function["name"], function["arguments"]) for function in functions],
    )
