"""Answers that a request names by their turn, read from the rollout's record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.prompt.conversation import (
    Conversation,
    TemplateMessage,
    answer_message,
    message_key,
    parse_conversation,
)
from rollout.gateway.prompt.token_text import StopStrings
from services.chassis.errors import invalid_argument, not_found

if TYPE_CHECKING:
    from seamflow.trajectory.v1 import trajectory_pb2

    from rollout.gateway.prompt.chat_template import ChatTemplate

_ENDED = (tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH)
_STAND_IN = {"role": "user", "content": "?"}
"""For the messages of a conversation that are known as tokens only."""


def needs_record(given: pb.Messages) -> bool:
    return bool(given.after_turn_id) or any(m.HasField("recorded") for m in given.messages)


class RecordedTurns:
    def __init__(self, template: ChatTemplate, turns: Sequence[trajectory_pb2.Turn]) -> None:
        self._template = template
        self._turns = {turn.turn_id: turn for turn in turns}

    def resolved(self, given: pb.Messages) -> pb.Messages:
        """The messages with their recorded parts filled in.

        Raises:
            ServiceError: NOT_FOUND, a turn is unknown; INVALID_ARGUMENT, it has no such call.
        """
        whole = pb.Messages()
        whole.CopyFrom(given)
        for index, message in enumerate(whole.messages):
            if message.HasField("recorded"):
                before = pb.Messages()
                before.CopyFrom(whole)
                del before.messages[index:]
                conversation = self._template.conversation_of(parse_conversation(before))
                answer = self.answer(message.recorded.turn_id, conversation)
                _fill(f"messages.messages[{index}]", message, answer_message(answer))
        return whole

    def answer(self, turn_id: str, conversation: Conversation) -> TemplateMessage:
        """The answer of a turn to a conversation. Raises `ServiceError`: NOT_FOUND."""
        turn, template = self._ended(turn_id), self._template
        number, own = _num_environment(turn.tokens), list(turn.tokens.token_ids)
        opening = self._opening(turn, own[:number], template.prompt_end(conversation))
        stop = StopStrings(template, turn.sampling.stop).found(own[number:])
        answer = template.parse(own[number:], stop, conversation, opening).message
        if turn.message_keys and message_key(answer) != turn.message_keys[-1]:
            # It was sampled with tool_choice "none".
            plain = template.parse(own[number:], stop, conversation, opening, has_calls=False)
            answer = plain.message
        return answer

    def _opening(self, turn: trajectory_pb2.Turn, added: Sequence[int], header: str) -> str:
        """What the prompt of a turn has after `header`: the start of its answer."""
        text = self._template.text(added)
        if not header or header in text:
            return text.rpartition(header)[2] if header else ""
        before = self._sequence(turn)[: -len(turn.tokens.token_ids)]
        return text if self._template.text(before).endswith(header) else ""

    def continued(self, given: pb.Messages) -> tuple[Conversation, list[int]]:
        """A conversation that ends with new messages after a recorded turn, and all of its ids.

        What came before that turn's answer has a stand-in: it is known as tokens only.

        Raises:
            ServiceError: NOT_FOUND, the turn is unknown; INVALID_ARGUMENT.
            ValueError: the template cannot render them.
        """
        turn, template, field = self._ended(given.after_turn_id), self._template, "messages"
        new = parse_conversation(given)
        if template.fingerprint_of(new) != turn.template_fingerprint:
            cure = "its tools or template arguments were others: send the whole conversation"
            raise invalid_argument(f"{field}.after_turn_id", given.after_turn_id, cure)
        ids = self._sequence(turn)
        stand_in = replace(new, messages=[_STAND_IN])
        answer = self.answer(given.after_turn_id, stand_in)
        messages = [_STAND_IN, answer, *self._not_shown(new.messages, ids)]
        conversation = replace(new, messages=messages, num_before=len(ids))
        after = template.encode_after(conversation, 2, ids[-1])
        if after is None:
            raise ValueError("the chat template does not render messages after that turn's answer")
        return conversation, [*ids, *after]

    def _not_shown(
        self, messages: Sequence[TemplateMessage], ids: Sequence[int]
    ) -> Sequence[TemplateMessage]:
        """The messages after system messages that the recorded prompt has already."""
        number = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        shown = self._template.text(ids) if number else ""
        for message in messages[:number]:
            if message["content"].strip() not in shown:
                cure = "the recorded conversation has other instructions: send the whole one"
                raise invalid_argument("messages", message["content"][:40], cure)
        return messages[number:]

    def _ended(self, turn_id: str) -> trajectory_pb2.Turn:
        turn = self._turns.get(turn_id)
        if turn is None or turn.finish_reason not in _ENDED:
            raise not_found("ended turn", turn_id)
        return turn

    def _sequence(self, turn: trajectory_pb2.Turn) -> list[int]:
        """All ids of a turn: those that it shares with the turn before, then its own."""
        path = [turn]
        while path[-1].prefix_turn_id:
            path.append(self._turns[path[-1].prefix_turn_id])
        ids: list[int] = []
        for index, each in enumerate(reversed(path)):
            ids = ids[: each.prefix_length] if index else []
            ids.extend(each.tokens.token_ids)
        return ids


def _num_environment(tokens: tokens_pb2.Tokens) -> int:
    policy = (span.start for span in tokens.spans if span.origin == tokens_pb2.ORIGIN_POLICY)
    return next(policy, len(tokens.token_ids))


def _fill(path: str, message: pb.Message, answer: pb.Message) -> None:
    """Fill in the recorded parts of `message`, in place, before what it has itself."""
    recorded, own = message.recorded, [*message.tool_calls]
    if recorded.content:
        own_content = [*message.content]
        del message.content[:]
        message.content.extend([*answer.content, *own_content])
    if recorded.reasoning:
        message.reasoning = answer.reasoning + message.reasoning
    for index in recorded.tool_calls:
        if not 0 <= index < len(answer.tool_calls):
            cure = f"turn {recorded.turn_id} has {len(answer.tool_calls)} tool calls"
            raise invalid_argument(f"{path}.recorded.tool_calls", index, cure)
    calls: Mapping[int, pb.ToolCall] = dict(enumerate(answer.tool_calls))
    del message.tool_calls[:]
    message.tool_calls.extend([*(calls[i] for i in recorded.tool_calls), *own])
    message.ClearField("recorded")
