"""What a request demands of its answer, and whether the answer meets it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.prompt.constraint.json_schema import JsonSchema, check_of
from rollout.gateway.prompt.conversation import Conversation
from rollout.gateway.prompt.token_text import TextStream
from services.chassis.errors import invalid_argument

if TYPE_CHECKING:
    from rollout.gateway.prompt.answer.response_format import Answer
    from rollout.gateway.prompt.chat_template import ChatTemplate
    from rollout.gateway.prompt.conversation import Conversation, TemplateMessage


_MARK = f"content-{uuid.uuid4().hex}"
_NAMES = ("alpha", "weather")
_ARGUMENTS: tuple[Mapping[str, Any], ...] = ({"city": "x"}, {"new": "x"}, {})
_CALL_ID = "000000000"  # Mistral's templates accept no other length
_TRIMMED = "{< "
"""Not part of an opening: tokenizers join a bracket with what follows it."""


def call_opening(template: ChatTemplate, conversation: Conversation, name: str) -> str:
    """The answer's text up to the name of its tool, or up to the arguments of tool `name`.

    Raises:
        ValueError: the template writes no call that is parsed as one.
    """
    if not template.format.parses_tool_calls:
        raise ValueError(
            f"answers in the format {template.format.name!r} have no tool calls: "
            "name the model's format in the gateway's response_format"
        )
    calls = [(name, each) for each in _ARGUMENTS] if name else [(n, _ARGUMENTS[0]) for n in _NAMES]
    prompt = template.render(conversation)
    texts = [_written(template, conversation, prompt, _call(*call)) for call in calls]
    for (called, _), text in zip(calls, texts, strict=True):
        _check_call(template, conversation, text, called)
    opening = _common_start(texts)
    return opening.rstrip(_TRIMMED) if name else opening


def content_opening(template: ChatTemplate, conversation: Conversation, begun: str) -> str:
    """The answer's text up to and with `begun`, the beginning of its content.

    A template may trim white space before it.

    Raises:
        ValueError: the template writes no answer that is parsed as content.
    """
    answer = {"content": begun + _MARK}
    text = _written(template, conversation, template.render(conversation), answer)
    head, mark, _ = text.partition(_MARK)
    read = template.format.parse(head + mark, template.prompt_end(conversation))
    if not mark or read.message["content"].strip() != answer["content"].strip():
        raise ValueError("the chat template changes the content of answers")
    return head


def _common_start(texts: Sequence[str]) -> str:
    columns = zip(*texts, strict=False)
    return "".join(c[0] for c in takewhile(lambda column: len(set(column)) == 1, columns))


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "content": "",
        "tool_calls": [{"id": _CALL_ID, "type": "function", "function": function}],
    }


def _check_call(template: ChatTemplate, conversation: Conversation, text: str, called: str) -> None:
    """Raises ValueError: `text` is not parsed as one call of that tool."""
    answer = template.format.parse(text, template.prompt_end(conversation), conversation.tools)
    calls = answer.message.get("tool_calls", ())
    if [call["function"]["name"] for call in calls] != [called]:
        raise ValueError(f"the chat template writes tool calls that are not parsed: {text[:80]!r}")


def _written(
    template: ChatTemplate, conversation: Conversation, prompt: str, answer: Mapping[str, Any]
) -> str:
    """What the template writes of an answer after `prompt`.

    Raises:
        ValueError: it writes the answer elsewhere, or cannot render it.
    """
    messages = [*conversation.messages, {"role": "assistant", **answer}]
    whole = template.render(conversation.with_messages(messages), add_prompt=False)
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    tag, end = template.format.reasoning_tags(prompt)
    before = prompt.rstrip().removesuffix(tag)
    if tag and whole.startswith(before):  # it leaves out reasoning that is empty
        return f"\n{end}\n\n{whole[len(before) :]}"
    raise ValueError("the chat template does not write an answer where its prompt ends")


class JsonEnd:
    """Finds the end of one object or array in a growing text."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> bool:
        """Whether the value is complete within `text`, which comes next."""
        return any(self._closes(character) for character in text)

    def _closes(self, character: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif character == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._is_escaped = character == "\\"
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class AnswerEnd:
    """The end of one answer, looked for in each of its tokens once."""

    def __init__(
        self,
        template: ChatTemplate,
        feed: Callable[[str], bool],
        is_whole: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        """`feed` takes the answer's text and tells when it is complete.

        It may tell so one token late: where `is_whole` holds for the tokens before, they are all.
        """
        self._text = TextStream(template)
        self._feed = feed
        self._is_whole = is_whole
        self._seen: list[int] = []

    def num_until_end(self, token_ids: Sequence[int]) -> int | None:
        """How many of the next tokens belong to the answer; None: the answer goes on."""
        for index, token_id in enumerate(token_ids):
            is_complete = self._feed(self._text.push([token_id]))
            if is_complete:
                is_late = self._is_whole is not None and self._is_whole(self._seen)
                return index if is_late else index + 1
            self._seen.append(token_id)
        return None


_AUTO = 'or send tool_choice "auto"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """How one answer has to begin and end."""

    calls_tool: bool = False
    """It begins with a tool call."""
    tool: str = ""
    """Tool that it calls; empty: any."""
    one_call: bool = False
    """It ends with its first call."""
    schema: JsonSchema | None = None
    """Schema of its content."""
    no_call: bool = False
    """What looks like a tool call is content."""
    prefill: str = ""
    """Text with which the agent has begun it."""
    opening: str = ""
    """Text with which it begins: tokens of the prompt."""

    @classmethod
    def of_request(
        cls,
        request: pb.GenerateRequest,
        template: ChatTemplate,
        conversation: Conversation | None,
        prefill: str = "",
    ) -> Constraint:
        """What a request demands; `conversation` None: its prompt is ids.

        Raises:
            ServiceError: INVALID_ARGUMENT, it cannot be met.
        """
        choice, schema = request.tool_choice, request.response_schema_json
        has_choice = choice.required or choice.name or choice.one_call
        if prefill and (choice.required or choice.name or schema):
            cure = "the last message begins the answer already: leave one of them out"
            field = "response_schema_json" if schema else "tool_choice"
            raise invalid_argument(field, "set", cure)
        if not (has_choice or schema or prefill):
            return cls(no_call=choice.none)
        if conversation is None:
            field = "tool_choice" if has_choice else "response_schema_json"
            raise invalid_argument(field, "set", "give messages: the prompt is token_ids")
        demanded = cls(
            calls_tool=bool(choice.required or choice.name),
            tool=choice.name or (_only_tool(conversation) if choice.required else ""),
            one_call=choice.one_call,
            schema=_schema(schema),
            no_call=choice.none,
            prefill=prefill,
        )
        demanded._check_tools(template, conversation)
        return demanded._with_opening(template, conversation)

    def _check_tools(self, template: ChatTemplate, conversation: Conversation) -> None:
        names = [tool["function"]["name"] for tool in conversation.tools]
        if self.calls_tool and not names:
            raise invalid_argument("tool_choice", self._shown, f"give tools, {_AUTO}")
        if self.tool and self.tool not in names:
            cure = f"must be one of the tools {', '.join(names)[:200]}"
            raise invalid_argument("tool_choice.name", self.tool, cure)
        if self.one_call and names and not template.format.has_single_calls:
            cure = f"answers in the format {template.format.name!r} list their calls: leave it out"
            raise invalid_argument("tool_choice.one_call", "true", cure)

    def _with_opening(self, template: ChatTemplate, conversation: Conversation) -> Constraint:
        try:
            if self.calls_tool:
                return replace(self, opening=call_opening(template, conversation, self.tool))
            if self.prefill:
                opening = content_opening(template, conversation, self.prefill)
                return replace(self, opening=opening)
            if self.schema is not None and (self.no_call or not conversation.tools):
                opening = content_opening(template, conversation, self.schema.bracket)
                return replace(self, opening=opening)
        except (ValueError, RecursionError) as error:
            if self.calls_tool:
                cure = f"{error}; {_AUTO}"
                raise invalid_argument("tool_choice", self._shown, cure) from error
            field = "messages" if self.prefill else "response_schema_json"
            raise invalid_argument(field, "the start of an answer", str(error)) from error
        return self

    @property
    def _shown(self) -> str:
        return self.tool or "required"

    def end(self, template: ChatTemplate, conversation: Conversation | None) -> AnswerEnd | None:
        """Finds where the sampled tokens have to end; None: only where the policy ends them."""
        if self.opening and not self.calls_tool and self.schema is not None:
            value = JsonEnd()
            value.feed(self.schema.bracket)
            return AnswerEnd(template, value.feed)
        if self.no_call or not (self.one_call and conversation and conversation.tools):
            return None
        calls = template.call_counter(conversation)
        calls.feed(self.opening)

        def is_whole(token_ids: Sequence[int]) -> bool:
            answer = template.parse(token_ids, None, conversation, self.opening)
            return not answer.error and len(answer.message.get("tool_calls", ())) == 1

        return AnswerEnd(template, calls.feed, is_whole)

    def shown(self, message: TemplateMessage) -> TemplateMessage:
        """The answer as the agent gets it: without the text with which it has begun it."""
        content, begun = message["content"], self.prefill
        begun = begun if content.startswith(begun) else begun.lstrip()
        return {**message, "content": content.removeprefix(begun)}

    def tool_check(self, answer: Answer) -> pb.AnswerCheck | None:
        """Whether the answer has the call that it must have; None: it need not."""
        if not self.calls_tool:
            return None
        names = _called(answer)
        if names and self.tool in ("", names[0]):
            return check_of(pb.CHECK_RESULT_VALID)
        why = f"it calls {', '.join(names)[:200]}" if names else answer.error or "it has no call"
        return check_of(pb.CHECK_RESULT_INVALID, why)

    def schema_check(self, answer: Answer) -> pb.AnswerCheck | None:
        """Whether the answer's content is valid; None: it need not be."""
        if self.schema is None:
            return None
        if _called(answer):
            return check_of(pb.CHECK_RESULT_UNCHECKED, "the answer is a tool call")
        return self.schema.check(answer.message["content"])


def _called(answer: Answer) -> list[Any]:
    return [call["function"]["name"] for call in answer.message.get("tool_calls", ())]


def _only_tool(conversation: Conversation) -> str:
    """The tool that any call must call; empty: there are several, or none."""
    names = [tool["function"]["name"] for tool in conversation.tools]
    return str(names[0]) if len(names) == 1 else ""


def _schema(text: str) -> JsonSchema | None:
    if not text:
        return None
    try:
        return JsonSchema(text)
    except ValueError as error:
        raise invalid_argument("response_schema_json", text[:40], str(error)) from error
