"""Parses one answer as it grows, by a response template of `transformers.utils.chat_parsing`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser


class Markers:
    """Literal texts that are looked for in a growing text."""

    def __init__(self, literals: Iterable[str]) -> None:
        known = sorted(set(literals) - {""}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self._starts = {literal[:n] for literal in known for n in range(1, len(literal))}
        self._longest = max(map(len, known), default=1) - 1

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The first marker from `start` on, of two that begin together the longer one."""
        return self._pattern.search(text, start)

    def decided(self, text: str) -> int:
        """Characters before the longest end of `text` that more text may complete to a marker."""
        for number in range(min(self._longest, len(text)), 0, -1):
            if text[-number:] in self._starts:
                return len(text) - number
        return len(text)


class FieldText:
    """Text of one field of an answer, which comes in pieces.

    Special tokens are left out, and pieces joined by line breaks. White space next to other parts
    of the answer belongs to its form and is left out; of an `exact` text the rest is as sampled.
    What is returned at once concatenates to the same text however its pieces are cut.
    """

    def __init__(self, special: Markers, lead: str = "", *, exact: bool = False) -> None:
        """`lead` may come before the first piece and is no part of it."""
        self._special = special
        self._lead = lead
        self._exact = exact
        self._waiting = ""  # may be the start of a special token
        self._space = ""  # white space that text has to follow
        self._num_pieces = 0
        self._in_piece = False
        self._follows = not exact

    def follow(self) -> None:
        """Another part of the answer comes before the next piece."""
        self._follows = True

    def add(self, text: str) -> str:
        """What is certain with more text of a piece."""
        self._waiting += text
        return self._visible(self._without_special(is_whole=False))

    def close(self, *, is_last: bool = False) -> str:
        """What is certain with the end of a piece, or of the answer."""
        new = self._visible(self._without_special(is_whole=True))
        if is_last and self._exact and (self._in_piece or not self._follows):
            new += self._space
        self._space, self._in_piece = "", False
        return new

    def _without_special(self, *, is_whole: bool) -> str:
        text, kept, start = self._waiting, [], 0
        decided = len(text) if is_whole else self._special.decided(text)
        while (found := self._special.search(text, start)) and found.start() < decided:
            kept.append(text[start : found.start()])
            start = found.end()
        decided = max(decided, start)
        self._waiting = text[decided:]
        return "".join((*kept, text[start:decided]))

    def _visible(self, text: str) -> str:
        """`text` without what may be white space next to another part, joined to what is before."""
        text = self._space + text
        begun = text if self._in_piece else self._begun(text)
        new = begun.rstrip()
        if not new:
            self._space = text
            return ""
        self._space = begun[len(new) :]
        if self._in_piece:
            return new
        self._in_piece = True
        self._num_pieces += 1
        return "\n" + new if self._num_pieces > 1 else new

    def _begun(self, text: str) -> str:
        """The beginning of a piece: after another part, from its first line with text on."""
        if not self._follows:
            return text.removeprefix(self._lead)
        body = text.lstrip()
        lead = text[: len(text) - len(body)]
        return lead[lead.rfind("\n") + 1 :] + body if self._exact and "\n" in lead else body


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
