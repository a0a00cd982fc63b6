"""Parts of a turn: who says what, by the marks of the chat template.

Where no mark is known, what the environment wrote is one part, and each answer of the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seamflow.token_text import (
    Decode,
    decoder_of,
    load_decoder,
    read_tokenizer,
    token_numbers,
)

from services.chassis.log import get_logger

_CONTEXT = 4
"""Tokens before a window that its first token's text may depend on."""
_LONGEST = 12
"""Tokens of one character, or of bytes that are none; then they are shown as they are."""
_log = get_logger()

HEADERS = frozenset({"<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|header_start|>"})
"""Followed by the name of who speaks, to the end of the line or of the header."""
HEADER_ENDS = frozenset({"<|end_header_id|>", "<|header_end|>"})
SPEAKERS: Mapping[str, str] = {
    "<|system|>": "system",
    "<|user|>": "user",
    "<|assistant|>": "assistant",
    "<|tool|>": "tool",
    "<|observation|>": "tool",
    "<｜User｜>": "user",
    "<｜Assistant｜>": "assistant",
    "[INST]": "user",
    "[/INST]": "assistant",
    "[SYSTEM_PROMPT]": "system",
    "[/SYSTEM_PROMPT]": "user",
    "[TOOL_RESULTS]": "tool",
    "[/TOOL_RESULTS]": "assistant",
}
"""Who speaks after a mark."""
TURN_ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
    | {"<|eot|>", "<｜end▁of▁sentence｜>", "</s>", "<|end_of_text|>", "<eos>"}
)
"""After these marks the text belongs to no role, until the next mark."""
INNER: Mapping[str, tuple[str, bool]] = {
    "<think>": ("reasoning", True),
    "</think>": ("reasoning", False),
    "<tool_call>": ("tool_call", True),
    "</tool_call>": ("tool_call", False),
    "<tool_response>": ("tool_result", True),
    "</tool_response>": ("tool_result", False),
    "[TOOL_CALLS]": ("tool_call", True),
    "<|python_tag|>": ("tool_call", True),
    "<|tool_call_begin|>": ("tool_call", True),
    "<|tool_call_end|>": ("tool_call", False),
}
"""Kind of what is inside, and whether it begins there."""
ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "ipython": "tool",
    "function": "tool",
}
"""Names in headers."""


_HEADER_TOKENS = 8
_MARKS = HEADERS | HEADER_ENDS | TURN_ENDS | SPEAKERS.keys() | INNER.keys()


class TokenText:
    """Decodes ids, whole or one by one; special tokens are shown."""

    def __init__(self, decode: Decode, marks: Mapping[str, int]) -> None:
        """`marks`: ids of the tokenizer's added tokens, by text."""
        self.decode = decode
        self.marks = marks

    def texts(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """The text of each id, which joined are the whole text.

        A character of several tokens is the text of its last one. `before`: what precedes.
        """
        given = [*before[-_CONTEXT:], *ids]
        shown, read, texts = 0, len(given) - len(ids), list[str]()
        for end in range(read + 1, len(given) + 1):
            known = self.decode(given[shown:read]) if read > shown else ""
            text = self.decode(given[shown:end])[len(known) :]
            is_whole = not text.endswith("\N{REPLACEMENT CHARACTER}")
            if is_whole or end - read > _LONGEST or end == len(given):
                texts.append(text)
                shown, read = read, end
            else:
                texts.append("")
        return texts


def load_token_text(folder: str) -> TokenText:
    """The tokenizer of a model folder; without one, ids stand for text."""
    file = Path(folder) / "tokenizer.json"
    try:
        if not (folder and file.is_file()):
            return TokenText(load_decoder(folder) if folder else token_numbers, {})
        tokenizer = read_tokenizer(file)
    except ValueError as error:
        _log.info("ids_stand_for_text", detail=str(error))
        return TokenText(token_numbers, {})
    marks = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    return TokenText(decoder_of(tokenizer), marks)


@dataclass(slots=True)
class Part:
    """Tokens [start, start + count) of what was given."""

    role: str
    """system, user, assistant or tool."""
    kind: str
    start: int
    count: int


def parts_of(ids: Sequence[int], is_policy: Sequence[bool], text: TokenText) -> list[Part]:
    """The parts of consecutive tokens, of which `is_policy` are the policy's."""
    reader = _Reader(ids, text)
    for start, end, sampled in _runs(is_policy):
        reader.read(start, end, sampled)
    return [part for part in reader.parts if text.decode(ids[part.start : _end(part)]).strip()]


def _end(part: Part) -> int:
    return part.start + part.count


def _runs(is_policy: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    """Stretches of one origin."""
    start = 0
    for i in range(1, len(is_policy) + 1):
        if i == len(is_policy) or is_policy[i] != is_policy[start]:
            yield start, i, is_policy[start]
            start = i


class _Reader:
    """Goes over the tokens once; a part ends where a mark, or another origin, begins."""

    def __init__(self, ids: Sequence[int], text: TokenText) -> None:
        self.parts: list[Part] = []
        self._ids = ids
        self._text = text
        self._marks = {i: mark for mark, i in text.marks.items() if mark in _MARKS}
        self._role = "user"

    def read(self, start: int, end: int, sampled: bool) -> None:
        if sampled:
            self._role = "assistant"
        elif self._role == "assistant":
            self._role = "user"
        self._begin(start, "text")
        at = start
        while at < end:
            mark = self._marks.get(self._ids[at])
            after = at + 1 if mark is None else self._after(mark, at, end, sampled)
            self.parts[-1].count += 1 if mark is None else 0
            at = after

    def _begin(self, start: int, kind: str) -> None:
        self.parts.append(Part(self._role_of(kind), kind, start, 0))

    def _role_of(self, kind: str) -> str:
        return "tool" if kind == "tool_result" else self._role

    def _after(self, mark: str, at: int, end: int, sampled: bool) -> int:
        """Begin what the mark begins; returns where the text continues."""
        after = at + 1
        if mark in HEADERS and not sampled:
            after = self._header(after, end)
        elif mark in SPEAKERS and not sampled:
            self._role = SPEAKERS[mark]
        kind, begins = INNER.get(mark, ("text", False))
        if kind == "text" and self._role == "tool":
            kind, begins = "tool_result", True
        self._begin(after, kind if begins else "text")
        return after

    def _header(self, start: int, end: int) -> int:
        """Read who speaks; returns the place after the header."""
        after = start
        while after < min(end, start + _HEADER_TOKENS):
            token = self._ids[after]
            after += 1
            is_end = self._marks.get(token) in HEADER_ENDS
            if is_end or "\n" in self._text.decode([token]):
                break
        words = self._text.decode(self._ids[start:after]).split("<")[0].split()
        self._role = ROLES.get(words[0].lower(), "user") if words else "user"
        return after
