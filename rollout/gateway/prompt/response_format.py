"""Response formats: from the text of an answer to content, reasoning and tool calls.

A format is a response template of `transformers.utils.chat_parsing`. It comes from the setting
`response_format`, from the tokenizer, or is chosen by the markers in the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.gateway.prompt.answer_parser import AnswerParser, Delta
from rollout.gateway.prompt.answer_text import Markers
from rollout.gateway.prompt.model_families import BUILT_IN, MARKERS
from services.chassis import plugins
from services.chassis.errors import ConfigError

__all__ = ["Answer", "AnswerStream", "ResponseFormat", "load_response_format"]

_ANY_START = r"\A"
_REASONING = ("reasoning_content", "thinking")
_MALFORMED = (ValueError, KeyError, TypeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed answer."""

    message: Mapping[str, Any]
    """As chat templates take it: role, content, reasoning_content, tool_calls."""
    error: str = ""
    """Why its tool calls could not be parsed; their markup then is part of the content."""


class ResponseFormat:
    """Parses the answers of one model."""

    def __init__(
        self,
        template: Mapping[str, Any],
        special_tokens: Sequence[str] = (),
        stop_tokens: Sequence[str] = (),
    ) -> None:
        """`special_tokens` are left out of texts, but for those that mark tool calls.

        Raises:
            ValueError: `template` is no response template, or has no content that is text.
        """
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.fields = _joining(template)
        self.structured = frozenset(name for name, f in self.fields.items() if not _is_text(f))
        """Fields that are no text."""
        if "content" not in self.fields or "content" in self.structured:
            raise ValueError('a response template needs a field "content" that is text')
        whole = {**template, "fields": self.fields, "defaults": {}}
        self._template = load_response_template(whole)
        scanned = {n: f if _is_text(f) else _unread(f) for n, f in self.fields.items()}
        self._scanned = load_response_template({**whole, "fields": scanned})
        texts = {n: f for n, f in self.fields.items() if _is_text(f)}
        self._texts_only = load_response_template({**whole, "fields": texts})
        calls = self.fields.get("tool_calls", {})
        self.special = Markers(
            token
            for token in special_tokens
            if token in stop_tokens or not _is_in_markers(token, calls)
        )
        """Tokens that are left out of texts."""
        self.parses_tool_calls = bool(calls)
        """Whether it knows tool calls."""
        self.parses_reasoning = any(name in self.fields for name in _REASONING)
        """Whether it knows reasoning."""
        self.is_plain = set(self.fields) == {"content"}
        """Whether an answer is its text."""
        self._takes_header = template.get("start_anchor_pattern") != _ANY_START
        self._tag = calls.get("content_args", {}).get("tag_pattern")

    def parse(
        self,
        text: str,
        prompt_end: str,
        tools: Sequence[Mapping[str, Any]] = (),
        position: int = 0,
    ) -> Answer:
        """Parse an answer, special tokens included.

        `prompt_end` is what the template wrote after the last message: the header of the answer,
        and maybe the opening tag of its reasoning. Tool calls at another `position` of the
        conversation have other ids.
        """
        prefix, seed = self._prefix(prompt_end), f"{position} {text}"
        try:
            return Answer(_message(AnswerParser(self, self._template, prefix, tools), text, seed))
        except _MALFORMED as error:
            parser = AnswerParser(self, self._texts_only, prefix)
            return Answer(_message(parser, text, seed), " ".join(str(error).split())[:400])

    def stream(self, prompt_end: str, stops: Sequence[str] = ()) -> AnswerStream:
        """Increments of the answer that ends before the first of `stops`."""
        prefix = self._prefix(prompt_end)
        parser = AnswerParser(self, self._scanned, prefix, until_structure=True)
        return AnswerStream(parser, stops)

    def check_body(self, body: str) -> None:
        """Raises ValueError: arguments in tags have other text between them, or are cut."""
        if self._tag and re.sub(self._tag, "", body, flags=re.DOTALL).strip():
            raise ValueError(f"tool call has text between its parameters: {body[:80]!r}")

    def _prefix(self, prompt_end: str) -> str:
        """What the parser reads before the answer."""
        if self._takes_header:
            return prompt_end
        opening = next((self.fields[n].get("open", []) for n in _REASONING if n in self.fields), [])
        tags = [opening] if isinstance(opening, str) else opening
        return next((tag for tag in tags if prompt_end.rstrip().endswith(tag)), "")


class AnswerStream:
    """Increments of an answer's content and reasoning. Concatenated they are its parsed texts.

    What a stream has returned depends on the text it has got, not on how that was cut. From the
    first tool call on everything waits for the end: a malformed one is content.
    """

    def __init__(self, parser: AnswerParser, stops: Sequence[str] = ()) -> None:
        self._parser = parser
        self._stops = Markers(stops)
        self._waiting = ""  # may be the start of a stop string
        self._num_sent = {"content": 0, "reasoning": 0}
        self._has_stopped = False

    def push(self, text: str) -> Delta:
        """What is certain with more text."""
        if self._has_stopped:
            return Delta()
        self._waiting += text
        found = self._stops.search(self._waiting)
        self._has_stopped = found is not None
        end = found.start() if found else self._stops.decided(self._waiting)
        delta = self._parser.feed(self._waiting[:end])
        self._waiting = self._waiting[end:]
        self._num_sent["content"] += len(delta.content)
        self._num_sent["reasoning"] += len(delta.reasoning)
        return delta

    def rest(self, answer: Answer) -> Delta:
        """What the whole answer has beyond all that was returned."""
        return Delta(
            answer.message["content"][self._num_sent["content"] :],
            answer.message.get("reasoning_content", "")[self._num_sent["reasoning"] :],
        )


def load_response_format(
    name: str,
    tokenizer: Any,
    special_tokens: Sequence[str] = (),
    stop_tokens: Sequence[str] = (),
) -> ResponseFormat:
    """The format of setting `response_format`.

    "auto", a built-in name, a JSON file or a plug-in "package.module:NAME", which is a dict.

    Raises:
        ConfigError: an unknown name, or no response template.
    """
    template = getattr(tokenizer, "response_template", None) if name == "auto" else None
    if name == "auto" and template is None:
        source = tokenizer.chat_template or ""
        name = next((known for marker, known in MARKERS if marker in source), "text")
    try:
        template = template or _template_of(name)
        return ResponseFormat(template, special_tokens, stop_tokens)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"response_format {name!r}: {error}") from error


def _template_of(name: str) -> Mapping[str, Any]:
    if name in BUILT_IN:
        return {"start_anchor_pattern": _ANY_START, "fields": BUILT_IN[name]}
    if name.endswith(".json"):
        found = json.loads(Path(name).read_text("utf-8"))
    elif ":" in name:
        found = plugins.load(name)
    else:
        known = ", ".join(sorted(BUILT_IN))
        raise ConfigError(
            f"response_format is {name!r}: give auto, {known}, a .json file, "
            'or a plug-in "package.module:NAME"'
        )
    if not (isinstance(found, Mapping) and isinstance(found.get("fields"), Mapping)):
        raise ValueError('a response template is an object with "fields"')
    return found


def _message(parser: AnswerParser, text: str, seed: str) -> dict[str, Any]:
    whole = parser.feed(text)
    whole.add(parser.finish())
    message: dict[str, Any] = {"role": "assistant", "content": whole.content}
    if whole.reasoning:
        message["reasoning_content"] = whole.reasoning
    if calls := parser.tool_calls(seed):
        message["tool_calls"] = calls
    return message


def _is_text(field: Mapping[str, Any]) -> bool:
    return field.get("content", "text") == "text" and "transform" not in field


def _joining(template: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields; texts that come in pieces lose none of them, and no field has to be there."""
    fields = deepcopy(dict(template["fields"]))
    for field in fields.values():
        field["optional"] = True
        if _is_text(field):
            field.update(repeats=True, join="\n")
    return fields


def _unread(field: Mapping[str, Any]) -> dict[str, Any]:
    """The same region, whatever is in it."""
    anchors = {key: field[key] for key in field if key.startswith(("open", "close"))}
    return {**anchors, "transform": "", "repeats": True, "join": ""}


def _is_in_markers(token: str, field: Mapping[str, Any]) -> bool:
    markers = [value for key, value in field.items() if key.startswith(("open", "close"))]
    return token in re.sub(r"\\(\W)", r"\1", "\n".join(map(str, markers)))
