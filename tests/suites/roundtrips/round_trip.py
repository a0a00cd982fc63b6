"""One random conversation with an agent whose client rewrites some of it now and then.

The prompt of every turn is compared with what is known of the conversation: which recorded turn it
has to continue, and which texts it may show.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.conversation import answer_message, parse_conversation
from rollout.gateway.prompt.prompt import History, Prompt
from rollout.gateway.record.turn_record import TurnRecord
from tests.suites.roundtrips.client import echoed, edited, said_by
from tests.suites.roundtrips.model_family import ModelFamily
from tests.suites.roundtrips.policy import MARK, TOOLS, Marks, random_said, sampled_ids, written
from tests.suites.roundtrips.recorded_gateway import PromptOf, RecordedGateway

FAILURES = ("prefix_mismatches", "render_mismatches", "end_mismatches", "silent_mismatches")
"""What may be wrong with a prompt: it does not begin with the recorded ids that it has to; it is
not the rendered conversation; an answer in it ends twice or never; it shows what was rewritten, or
lacks a message."""

TOOL_MESSAGES = [
    pb.Tool(
        name=name,
        description="a tool",
        parameters_json=json.dumps(
            {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}}
        ),
    )
    for name, types in TOOLS.items()
]
"""The tools of every conversation."""


@dataclass(slots=True)
class _Step:
    """What one side has said: an answer may be sent back as several messages."""

    messages: Sequence[pb.Message]
    is_answer: bool = False


@dataclass(slots=True)
class _Recorded:
    """A turn that has ended."""

    turn_id: str
    steps: Sequence[_Step]
    ids: Sequence[int]


@dataclass(slots=True)
class RoundTrip:
    """One conversation; `run` it once."""

    family: ModelFamily
    """Family of the policy."""
    template: ChatTemplate
    """Its chat template."""
    history: History
    """Setting of the gateway."""
    seed: int
    """Of everything random."""
    prompt_of: PromptOf = Prompt.parse
    """How the gateway reads prompts."""
    counts: Counter[str] = field(default_factory=Counter)
    """Turns by what became of them."""
    failures: list[str] = field(default_factory=list)
    """What is wrong, in words."""
    _steps: list[_Step] = field(default_factory=list)
    _turns: list[_Recorded] = field(default_factory=list)

    async def run(self) -> RoundTrip:
        """Have the conversation."""
        rng, marks = random.Random(self.seed), Marks()
        gateway = RecordedGateway(self.template, self.history, self.prompt_of)
        await gateway.start()
        if rng.random() < 0.5:
            self._add(said_by("system", marks.text(rng)))
        self._add(said_by("user", marks.text(rng)))
        for number in range(rng.randint(2, 5)):
            was_rewritten = number > 0 and rng.random() < 0.25 and self._rewrite(rng, marks)
            messages = [message for step in self._steps for message in step.messages]
            given = pb.Messages(messages=messages, tools=TOOL_MESSAGES)
            record = await gateway.begin(f"t{number}", given)
            self._check(record, given, was_rewritten=was_rewritten)
            await self._answer(gateway, record, rng, marks)
            self._follow(record, rng, marks)
        return self

    async def _answer(
        self, gateway: RecordedGateway, record: TurnRecord, rng: random.Random, marks: Marks
    ) -> None:
        text, has_stopped = written(self.family, random_said(self.family, rng, marks), rng)
        ids = sampled_ids(self.template, self.family, text, rng)
        await gateway.end(record, ids, has_stopped=has_stopped)

    def _follow(self, record: TurnRecord, rng: random.Random, marks: Marks) -> None:
        """Send the answer back, with the results of its tools or the next question."""
        answer = echoed(answer_message(record.answer.message), rng)
        self._steps.append(_Step(answer, is_answer=True))
        whole = [*record.prompt_ids, *record.sampled_ids]
        turn_id = f"t{len(self._turns)}"
        self._turns.append(_Recorded(turn_id, tuple(self._steps), whole))
        calls = [call for message in answer for call in message.tool_calls]
        self.counts["tool_calls"] += len(calls)
        self.counts["parse_errors"] += bool(record.answer.error)
        for call in calls:
            self._add(said_by("tool", marks.text(rng), tool_call_id=call.id, name=call.name))
        if not calls or rng.random() < 0.2:
            self._add(said_by("user", marks.text(rng)))

    def _add(self, message: pb.Message) -> None:
        self._steps.append(_Step([message]))

    def _rewrite(self, rng: random.Random, marks: Marks) -> bool:
        """Change one message, or go back to an earlier question."""
        index = rng.randrange(len(self._steps))
        step = self._steps[index]
        if not step.is_answer and rng.random() < 0.3 and step.messages[0].role == "user":
            del self._steps[index:]
            self._add(said_by("user", marks.text(rng)))
            return True
        messages = list(step.messages)
        position = rng.randrange(len(messages))
        messages[position] = edited(messages[position], marks.text(rng), rng)
        self._steps[index] = _Step(messages, step.is_answer)
        return True

    def _check(self, record: TurnRecord, given: pb.Messages, *, was_rewritten: bool) -> None:
        expected = self._continued()
        conversation = parse_conversation(given)
        whole = self.history == "as_template" and not self.template.keeps_history(conversation)
        self.counts["turns"] += 1
        if whole:
            self.counts["turns_rewritten_by_template"] += 1
            if list(record.prompt_ids) != self.template.encode(conversation):
                self._fail("render_mismatches", record)
        elif was_rewritten:
            self.counts["turns_after_rewritten_history"] += 1
        elif expected is not None:
            self.counts["turns_continued"] += 1
        if not whole and not self._continues(record, expected):
            self._fail("prefix_mismatches", record)
        if not whole and expected is not None and not self._has_one_end(record, expected):
            self._fail("end_mismatches", record)
        self._check_marks(record)

    def _continued(self) -> _Recorded | None:
        """The turn whose whole conversation is the longest beginning of this one."""
        matching = [
            turn
            for turn in self._turns
            if len(turn.steps) <= len(self._steps)
            and all(a is b for a, b in zip(turn.steps, self._steps, strict=False))
        ]
        return max(matching, key=lambda turn: len(turn.steps), default=None)

    def _continues(self, record: TurnRecord, expected: _Recorded | None) -> bool:
        """Whether the prompt begins with the recorded ids of `expected`, and is taken for it."""
        turn_id, ids = (expected.turn_id, expected.ids) if expected else ("", ())
        begins = list(record.prompt_ids[: len(ids)]) == list(ids)
        return begins and (record.prefix_turn_id, record.prefix_length) == (turn_id, len(ids))

    def _has_one_end(self, record: TurnRecord, expected: _Recorded) -> bool:
        """Whether what follows the recorded ids begins with a terminator where they have none."""
        ends = self.family.terminators
        rest = self.template.text(record.prompt_ids[len(expected.ids) :])
        has_ended = self.template.text(expected.ids).endswith(ends)
        return has_ended != rest.startswith(ends)

    def _check_marks(self, record: TurnRecord) -> None:
        """Whether the prompt shows all that others said, and nothing that was rewritten."""
        shown = MARK.findall(self.template.text(record.prompt_ids))
        required = _marks(step for step in self._steps if not step.is_answer)
        known = {mark for turn in self._turns_of_path() for mark in turn} | {*required}
        lacks_none = [mark for mark in shown if mark in {*required}] == required
        if not lacks_none or {*shown} - known:
            self._fail("silent_mismatches", record)

    def _turns_of_path(self) -> list[list[str]]:
        """Marks of the answers of this conversation, their reasoning included."""
        expected = self._continued()
        recorded = MARK.findall(self.template.text(expected.ids)) if expected else []
        return [recorded, _marks(self._steps)]

    def _fail(self, failure: str, record: TurnRecord) -> None:
        self.counts[failure] += 1
        text = self.template.text(record.prompt_ids)
        where = f"{self.family.name}, {self.history}, seed {self.seed}"
        self.failures.append(f"{where}: {failure} in {text!r}")


def _marks(steps: Iterable[_Step]) -> list[str]:
    """Marks in the texts of messages, in order."""
    return [mark for step in steps for m in step.messages for mark in MARK.findall(_text(m))]


def _text(message: pb.Message) -> str:
    content = "".join(part.text for part in message.content)
    arguments = (call.arguments_json for call in message.tool_calls)
    return " ".join((message.reasoning, content, *arguments))
