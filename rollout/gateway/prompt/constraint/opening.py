"""How an answer has to begin, found by rendering answers: as the chat template itself writes it.

So a template that closes its reasoning before an answer without any does so here too: an answer
that has to begin so does not reason first.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rollout.gateway.prompt.conversation import Conversation

if TYPE_CHECKING:
    from rollout.gateway.prompt.chat_template import ChatTemplate

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
