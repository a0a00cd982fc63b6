"""A text with a mathematical answer, as math-verify reads it: gold and answers alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from math_verify import (  # type: ignore[import-untyped]
    ExprExtractionConfig,
    LatexExtractionConfig,
    parse,
)

from services.tool_loop.math_answers.boxes import Box, last_boxes

__all__ = ["read", "read_expected"]

_SECONDS = 5
_LONGEST_ANSWER = 200
"""Characters of a text that may be an answer as a whole."""
_MARKS = ("$", r"\(", r"\[")
_WHOLE = re.compile(r"\s*(?:\$\$?|\\\(|\\\[)([^$]*?)(?:\$\$?|\\\)|\\\])[\s.]*")
"""One formula and nothing else."""
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi"
_BARE_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])")
_AROUND = " \t\n;:*"
_POWER = re.compile(r"(?<=[\w)}\]])\s*\*\*\s*(?=[\w({\\-])")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:infinity|inf|oo)\b)[A-Za-z]{2,}")
_QUANTITY = re.compile(r"\s*[^A-Za-z\\]*\d[^A-Za-z\\]*[A-Za-z ]+[.]?\s*")
_WITHOUT_WORDS = re.compile(r"\\(?:text|mathrm|operatorname|begin|end)\*?\s*\{[^{}]*\}")
_FORMULA = re.compile(
    r"(?:[\d+\-*/^=(),.|<>!\[\]{}_& ]|\\[A-Za-z]+|\\.|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z]))+"
)
_AREA = re.compile(r"-?\d[\d.,]*\s+m\s*\^\s*(?:[23]|\{[23]\})")
"""100 m^2: a quantity, where it is among words."""
_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ",
    "∅": r"\emptyset ", "∈": r"\in ", "±": r"\pm ", "°": r"^\circ ", "ℝ": r"\mathbb{R}",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅔": r"\frac{2}{3}", "²": "^{2}", "³": "^{3}",
}  # fmt: skip
_ROOT = re.compile(r"√\s*(?:\((?P<inner>[^()]*)\)|(?P<atom>\d+(?:\.\d+)?|[A-Za-z]))")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)")


def read(text: str) -> list[Any]:
    """Expressions of sympy that a text may mean, then texts; none: it has nothing mathematical.

    The last box counts, if there is one, and what is in it alone: where it cannot be read no number
    elsewhere takes its place. A text without any mark of LaTeX is a formula if it has no words;
    among words, those parts of it that have commands or powers are.
    """
    text = _latex(text)
    if boxes := last_boxes(text):
        return _of_boxes(text, boxes)
    if (whole := _WHOLE.fullmatch(text)) is not None:
        text = whole[1]
    if any(mark in text for mark in _MARKS):
        return _parsed(text, LatexExtractionConfig(), ExprExtractionConfig())
    if not _has_words(text):
        return _formula(text)
    marked = _FORMULA.sub(_marked, text)
    found = _parsed(marked, LatexExtractionConfig(), ExprExtractionConfig())
    return found + (_formula(text) if len(text) <= _LONGEST_ANSWER else [])


def read_expected(text: str) -> list[Any]:
    """What `read` finds, but all of an answer in words counts: "June 20" is not 20, "20 cm" is."""
    is_marked = any(mark in text for mark in (*_MARKS, r"\boxed", r"\fbox"))
    if is_marked or not _has_words(_latex(text)) or _QUANTITY.fullmatch(text):
        return read(text)
    return _formula(_latex(text)) or read(text)


def _of_boxes(text: str, boxes: Sequence[Box]) -> list[Any]:
    part = text[boxes[0].begin : boxes[-1].end]
    found = _parsed(part, LatexExtractionConfig(boxed_match_priority=0))
    if not _has_words(part) and any(not isinstance(each, str) for each in found):
        return found
    return read(boxes[-1].content) + found


def _has_words(text: str) -> bool:
    return _WORD.search(_WITHOUT_WORDS.sub("", text)) is not None


def _formula(text: str) -> list[Any]:
    formula = text.strip(_AROUND).rstrip(".,")
    return _parsed(f"${formula}$", LatexExtractionConfig())


def _marked(match: re.Match[str]) -> str:
    """A part of a text between its words, between dollar signs if it is more than a number."""
    part = match[0].strip(" .,")
    if _AREA.fullmatch(part) or not re.search(r"\\[A-Za-z]|\^", part):
        return match[0]
    return match[0].replace(part, f"${part}$", 1)


def _parsed(text: str, *readers: LatexExtractionConfig | ExprExtractionConfig) -> list[Any]:
    found: list[Any] = parse(text, readers, parsing_timeout=_SECONDS)
    return found


def _latex(text: str) -> str:
    """Characters and words that people write for commands, as commands."""
    text = text.replace(r"\$", "")  # of money
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root['inner'] or root['atom']}}}", text)
    for character, command in _UNICODE.items():
        text = text.replace(character, command)
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", _POWER.sub("^", text))
    return _BARE_FUNCTION.sub(r"\\\1", text)
