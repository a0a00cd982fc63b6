"""The prompt of one turn: messages rendered by the chat template, or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from typing import Literal

from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb
from seamflow.trajectory.v1.trajectory_pb2 import Turn

from rollout.gateway.prompt.answer.answer_parser import Delta
from rollout.gateway.prompt.answer.recorded_answer import RecordedTurns
from rollout.gateway.prompt.answer.response_format import Answer
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.constraint.constraint import Constraint
from rollout.gateway.prompt.conversation import (
    Conversation,
    TemplateMessage,
    message_key,
    message_keys,
    parse_conversation,
    split_prefill,
)
from rollout.gateway.prompt.left_out import check_parts, check_system_messages
from rollout.gateway.prompt.token_text import TextStream
from rollout.gateway.prompt.validation import check_ids
from services.chassis.errors import ServiceError, invalid_argument
from services.lib.token_bytes import pack_ids, unpack_ids

_MAX_CHARACTERS = 200
# Tokens decoded before the difference: a token's text may depend on its neighbour, and a character
# may begin in the shared prefix.
_CONTEXT = 16
# Ids of the prompt that are compared: the caller's pieces may be single bytes.
_MAX_IDS = 1024
_CUT = "\N{REPLACEMENT CHARACTER}"
"""Decoding gives this for a character whose last bytes are missing."""


def find_drift(
    template: ChatTemplate, prompt_ids: Sequence[int], divergence: store_pb.Divergence
) -> tokens_pb2.Drift | None:
    """The drift of a prompt whose ids differ from `divergence` on; None if its text differs too."""
    start = divergence.position
    context = list(prompt_ids[max(start - _CONTEXT, 0) : start])
    recorded_ids = unpack_ids(divergence.token_ids)
    recorded = template.text([*context, *recorded_ids]).rstrip(_CUT)
    given = template.text([*context, *prompt_ids[start : start + _MAX_IDS]]).rstrip(_CUT)
    shared = _num_shared(template.text(context).rstrip(_CUT), recorded, given)
    recorded, given = recorded[shared:], given[shared:]
    same = recorded.startswith(given) or given.startswith(recorded)
    if not (recorded and given and same):
        return None
    return tokens_pb2.Drift(
        position=start,
        recorded_text=recorded[:_MAX_CHARACTERS],
        retokenized_text=given[:_MAX_CHARACTERS],
    )


def _num_shared(*texts: str) -> int:
    """Characters that all texts begin with."""
    columns = zip(*texts, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


History = Literal["as_template", "as_sampled"]
"""What to do where the template rewrites earlier messages, such as dropping old reasoning:
as_template renders the whole conversation again, as_sampled keeps the recorded tokens."""
_MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Immutable. The store matches it with the record by `message_keys` if any, else by `ids`."""

    template: ChatTemplate
    conversation: Conversation | None = None
    """The messages; None for a prompt of ids."""
    message_keys: Sequence[str] = ()
    """Digest of each message; empty where the prompt is matched by its ids."""
    ids: Sequence[int] | None = None
    """All token ids; None where they depend on the prefix that the store has recorded."""
    constraint: Constraint = field(default_factory=Constraint)
    """What the answer has to be; its opening follows `ids`."""

    @classmethod
    def parse(
        cls,
        request: pb.GenerateRequest,
        template: ChatTemplate,
        history: History,
        max_tokens: int = _MAX_TOKENS,
        recorded: Sequence[Turn] = (),
    ) -> Prompt:
        """Read the prompt of a checked request; takes long for a long one.

        `recorded` are the rollout's turns, of which the messages may name some.

        Raises:
            ServiceError: INVALID_ARGUMENT, an id is none of the model's, the template cannot render
                the messages, or they have too many tokens; NOT_FOUND, a named turn is unknown.
        """
        if not request.HasField("messages"):
            ids = tuple(request.token_ids.token_ids)
            check_ids("token_ids.token_ids", ids, template.vocabulary_size)
            constraint = Constraint.of_request(request, template, None)
            return cls(template=template, ids=ids, constraint=constraint)
        turns = RecordedTurns(template, recorded)
        try:
            given, prefill = split_prefill(turns.resolved(request.messages))
            prompt = cls._of_messages(given, turns, template, history)
        except (ValueError, RecursionError) as error:
            raise _refused(len(request.messages.messages), error) from error
        constraint = Constraint.of_request(request, template, prompt.conversation, prefill)
        prompt = replace(prompt, constraint=constraint)
        if prompt.conversation is not None:
            check_parts(template.left_out, prompt.conversation)
        if len(prompt.ids or ()) > max_tokens:
            cure = f"send at most {max_tokens} (max_prompt_tokens)"
            raise invalid_argument("messages", f"{len(prompt.ids or ())} tokens", cure)
        return prompt

    @classmethod
    def _of_messages(
        cls, given: pb.Messages, turns: RecordedTurns, template: ChatTemplate, history: History
    ) -> Prompt:
        if given.after_turn_id:
            conversation, ids = turns.continued(given)
            conversation = replace(conversation, prompt_end=template.prompt_end(conversation))
            return cls(template=template, conversation=conversation, ids=ids)
        conversation = template.conversation_of(parse_conversation(given))
        check_system_messages(template.render, conversation)
        return cls._of_conversation(conversation, template, history)

    @classmethod
    def _of_conversation(
        cls, conversation: Conversation, template: ChatTemplate, history: History
    ) -> Prompt:
        conversation = replace(conversation, prompt_end=template.prompt_end(conversation))
        has_answers = bool(conversation.answer_ends)
        ids = None if has_answers else template.encode(conversation)
        if has_answers and history == "as_template" and not template.keeps_history(conversation):
            ids = template.encode(conversation)
            return cls(template=template, conversation=conversation, ids=ids)
        return cls(
            template=template,
            conversation=conversation,
            message_keys=message_keys(conversation.messages),
            ids=ids,
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the template, with the tools and arguments of the conversation."""
        if self.conversation is None:
            return self.template.fingerprint
        return self.template.fingerprint_of(self.conversation)

    @property
    def packed_ids(self) -> bytes:
        """`ids` as little-endian int32."""
        return pack_ids(self.ids or ())

    @property
    def num_answers(self) -> int:
        """Answers of the policy among the messages; 0 for a prompt of ids."""
        return len(self.conversation.answer_ends) if self.conversation is not None else 0

    @property
    def opening_ids(self) -> list[int]:
        """Ids of the text with which the answer has to begin."""
        return self.template.encode_text(self.constraint.opening)

    def parse_answer(self, sampled_ids: Sequence[int], stop: str | None) -> Answer:
        """The answer as a message; its content ends before the stop string `stop`."""
        opening, has_calls = self.constraint.opening, not self.constraint.no_call
        return self.template.parse(
            sampled_ids, stop, self.conversation, opening, has_calls=has_calls
        )

    def remaining_ids(self, begun: store_pb.BegunTurn) -> Sequence[int]:
        """Ids after the prefix that the store matched: this turn's environment tokens.

        Raises:
            ServiceError: INVALID_ARGUMENT, the template cannot render the messages, or cannot
                continue the recorded answer.
        """
        return [*self._ids_after(begun), *self.opening_ids]

    def _ids_after(self, begun: store_pb.BegunTurn) -> Sequence[int]:
        prefix = begun.prefix_token_ids
        if not self.message_keys:
            return (self.ids or ())[len(prefix) // 4 :]
        assert self.conversation is not None
        if not begun.num_matched_messages:
            return self._whole_ids(self.conversation)
        (last,) = unpack_ids(prefix[-4:])
        try:
            ids = self.template.encode_after(self.conversation, begun.num_matched_messages, last)
        except (ValueError, RecursionError) as error:
            raise _refused(len(self.conversation.messages), error) from error
        if ids is None:
            index = begun.num_matched_messages - 1
            cure = 'the chat template changes it with later messages: set history = "as_template"'
            raise invalid_argument(f"messages.messages[{index}]", "an answer", cure)
        return ids

    def _whole_ids(self, conversation: Conversation) -> Sequence[int]:
        if self.ids is not None:
            return self.ids
        try:
            return self.template.encode(conversation)
        except (ValueError, RecursionError) as error:
            raise _refused(len(conversation.messages), error) from error

    def drift(self, begun: store_pb.BegunTurn) -> tokens_pb2.Drift | None:
        """Retokenization drift; None for messages matched by keys, whose recorded ids are used."""
        if self.message_keys or not begun.HasField("divergence"):
            return None
        return find_drift(self.template, self.ids or (), begun.divergence)

    def answer_key(self, answer: TemplateMessage) -> str:
        """Key of `answer` as the next message; empty where the prompt is matched by its ids."""
        return message_key(answer) if self.message_keys else ""


def _refused(number: int, error: Exception) -> ServiceError:
    return invalid_argument("messages", f"{number} messages", str(error))


class TurnTexts:
    """Increments of the text of one turn, and of its answer's content and reasoning."""

    def __init__(self, prompt: Prompt, stops: Sequence[str]) -> None:
        self._markers = prompt.template.marker_ids
        self._text = TextStream(prompt.template)
        constraint = prompt.constraint
        self._answer = prompt.template.stream(
            prompt.conversation, stops, has_calls=not constraint.no_call
        )
        self._opening = self._answer.open(constraint.opening)
        if constraint.prefill:
            self._opening = Delta()  # the agent has it

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> tuple[str, Delta]:
        """Text that is complete with the next tokens, all of it with `last`; what it parses to."""
        texts = []
        delta, self._opening = self._opening, Delta()
        for is_marker, group in groupby(token_ids, self._markers.__contains__):
            texts.append(self._text.push([*group]))
            delta.add(self._answer.push(texts[-1], is_marker=is_marker))
        if last:
            texts.append(self._text.push([], last=True))
            delta.add(self._answer.push(texts[-1]))
        return "".join(texts), delta
