"""Parses one answer as it grows, by a response template of `transformers.utils.chat_parsing`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout.gateway.prompt.answer.answer_text import FieldText, Markers

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

TEXTS = {"content": "content", "reasoning_content": "reasoning", "thinking": "reasoning"}
"""Fields of response templates that are text, and what they are of an answer."""
_STEP = 1024
"""Characters that the reader gets at once; what it finds does not depend on it."""
_KEPT = 64
"""Characters before what comes next, for patterns that look at them or at the start."""
_ID_LENGTH = 9  # Mistral's templates accept no other


@dataclass(slots=True)
class Delta:
    """What an answer's text grows by."""

    content: str = ""
    reasoning: str = ""

    def add(self, more: Delta) -> None:
        """Append `more`, in place."""
        self.content += more.content
        self.reasoning += more.reasoning


class AnswerParser:
    """Reads the text of one answer once, from its start to its end."""

    def __init__(
        self,
        reader: ResponseParser,
        special: Markers,
        *,
        tag: str | None = None,
        lead: str = "",
        until_structure: bool = False,
    ) -> None:
        """`reader` tells the regions apart; `special` tokens are left out of texts.

        `tag` is the pattern of an argument in tags, `lead` white space before content that is no
        part of it. With `until_structure` everything from the
        first region on that is no text is left out.
        """
        self._reader = reader
        self._tag = tag
        self._until_structure = until_structure
        self._has_structure = self._is_last = False
        names = sorted(set(TEXTS.values()))
        self._texts = {name: FieldText(special, lead, exact=name == "content") for name in names}
        self._body = ""  # of a region that is no text
        self._calls: list[Any] = []

    def feed(self, text: str) -> Delta:
        """More text; what content and reasoning certainly grow by.

        Raises:
            ValueError, KeyError, TypeError, RecursionError: a tool call is malformed.
        """
        if self._until_structure and self._has_structure:
            return Delta()
        delta = Delta()
        # The reader looks for each marker up to the end of what it has.
        for start in range(0, len(text), _STEP):
            delta.add(self._take(self._reader.feed(text[start : start + _STEP])))
            self._forget()
        return delta

    def _forget(self) -> None:
        """Drop what the reader has read: it copies all that it holds for each marker."""
        reader = self._reader
        if (read := reader._pos) > _STEP:
            reader._buffer, reader._pos = reader._buffer[read - _KEPT :], _KEPT

    def finish(self) -> Delta:
        """The end of the answer: the rest of content and reasoning. Raises as `feed`."""
        self._is_last = True
        delta = self._take(self._reader.finalize()[1])
        for name, text in self._texts.items():
            delta.add(Delta(**{name: text.close(is_last=True)}))
        return delta

    def tool_calls(self, seed: str) -> list[dict[str, Any]]:
        """The calls; their ids differ by `seed`. Raises as `feed`."""
        seed = hashlib.sha256(seed.encode(errors="replace")).hexdigest()
        return [_checked_call(call, i, seed) for i, call in enumerate(self._calls)]

    @property
    def num_calls(self) -> int:
        """Tool calls that are complete."""
        return len(self._calls)

    def _take(self, events: Sequence[Mapping[str, Any]]) -> Delta:
        delta = Delta()
        for event in events:
            if TEXTS.get(event["field"]) != "content":
                self._texts["content"].follow()
            if event["field"] not in TEXTS:
                self._has_structure = True
                self._take_structure(event)
            elif not (self._until_structure and self._has_structure):
                delta.add(self._text_of(event))
        return delta

    def _text_of(self, event: Mapping[str, Any]) -> Delta:
        name = TEXTS[event["field"]]
        match event["type"]:
            case "region_chunk":
                return Delta(**{name: self._texts[name].add(event["text"])})
            case "region_close":
                return Delta(**{name: self._texts[name].close(is_last=self._is_last)})
        return Delta()

    def _take_structure(self, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "region_open":
                self._body = ""
            case "region_chunk":
                self._body += event["text"]
            case "region_close" if event["field"] == "tool_calls":
                self._check_body()
                value = event["value"]
                self._calls += value if isinstance(value, list) else [value]

    def _check_body(self) -> None:
        """Raises ValueError: arguments in tags have other text between them, or are cut."""
        if self._tag and re.sub(self._tag, "", self._body, flags=re.DOTALL).strip():
            raise ValueError(f"tool call has text between its parameters: {self._body[:80]!r}")


def _checked_call(call: Any, index: int, seed: str) -> dict[str, Any]:
    """A call with an id.

    Raises:
        ValueError: it has no name, or its arguments are no object that JSON can hold.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("function"), dict):
        function = function["function"]  # {"type": "function", "function": {"name": …}}
    name, arguments = _name_and_arguments(function) if isinstance(function, dict) else ("", None)
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError(f"tool call {index} is {json.dumps(call)[:80]}: no name with arguments")
    # NaN and lone surrogates are no JSON that others can read.
    json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    given = call.get("id")
    return {
        "id": given if isinstance(given, str) and given.isascii() and given else _id(index, seed),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _name_and_arguments(function: Mapping[str, Any]) -> tuple[Any, Any]:
    """Of a call; the arguments are called parameters at times, as in SGLang and vLLM."""
    given = [function[key] for key in ("arguments", "parameters") if key in function]
    if len(given) > 1 or (not given and function.keys() - {"name", "type", "id"}):
        raise ValueError(f"tool call has the keys {sorted(function)}: arguments are missing")
    return function.get("name"), given[0] if given else {}


def _id(index: int, seed: str) -> str:
    return hashlib.sha256(f"{index} {seed}".encode()).hexdigest()[:_ID_LENGTH]
