r"""Reward "math": math-verify reads and compares; here are the notations that it does not know.

Text without a mark of LaTeX is prepared: a formula gets one, since math-verify takes the first
number of `2\pi` for all of it; in words, Markdown's emphasis and letters beside a number go.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

_DIGITS = 100  # in which exact values differ, if they do; with math-verify's 15, 2^-98 is 2^-99
_BOX = re.compile(r"(?<!\\)\\(?:boxed|fbox)\s*(?:\{|$)")
_MARK = re.compile(r"(?<!\\)\$|\\\(|\\\[")
_EMPHASIS = re.compile(r"(?<![\w\\])([*_`~]{1,3})(?=\S)([^\n]+?)(?<=\S)\1(?!\w)")
_COMMAND = re.compile(r"\\(?:text|mathrm|operatorname|begin|end)\*?\s*\{[^{}]*\}|\\(?:[A-Za-z]+|.)")
_WORD = re.compile(r"(?<![\w\\])[^\W\d_]{2,}|[^\x00-\x7f]")
_NUMBER = re.compile(r"[^\\A-Za-z^_={}<>()\[\]]*|\s*-?[\d.,]+ [A-Za-z/]+(\^?\d)?\s*")  # SI: 2 m^2
_PART = re.compile(r"(?<!\S)[!-~]*(?:\\[A-Za-z]|\d[A-Za-z\\^])[!-~]*")  # of a text: 2x, 2\pi
_BESIDE = ("Ll", "Lm", "Lo", "Lt", "Lu", "Mc", "Mn", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "Sc", "So")
_NOTATIONS = (
    (re.compile(r"\N{MINUS SIGN}"), "-"),
    (re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))"), ""),  # SI: groups of three digits
    (re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)"), r"\1 \\times 10^{\2}"),
    (re.compile(r"(?<![\w.,/}-])(\d+) +(\d+)/(\d+)(?![\w/])"), r"\1+\2/\3"),  # mixed number
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}"), lambda found: _repeating(*found.groups())),
)


def is_right(expected: Sequence[str], answer: str) -> bool:
    """Whether `answer`, or what it says last, equals one of `expected`."""
    given: dict[str, Any] = {"numeric_precision": _DIGITS, "allow_set_relation_comp": True}
    found = [*_read(answer), answer.strip()]
    return any(verify([*_read(e), *_words(e), e.strip()], found, **given) for e in expected)


def is_cut_off(text: str) -> bool:
    """Whether the last box is never closed, so that its answer is not known."""
    boxes = list(_BOX.finditer(text))
    inside = re.sub(r"\\[{}]", "", text[boxes[-1].end() :]) if boxes else "}"
    while (shorter := re.sub(r"\{[^{}]*\}", "", inside)) != inside:
        inside = shorter
    return "}" not in inside


def _read(text: str) -> list[Any]:
    text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    for notation, form in _NOTATIONS:
        text = notation.sub(form, text)
    if _BOX.search(text):
        return list(parse(text, [LatexExtractionConfig(boxed_match_priority=0)]))
    if not _MARK.search(text):
        text = _EMPHASIS.sub(r"\2", text)
        text = f"${text.strip(' .')}$" if _is_formula(text) else _PART.sub(_marked, text)
        text = "".join("\n" if unicodedata.category(c) in _BESIDE and c > "~" else c for c in text)
    return list(parse(text))


def _words(text: str) -> list[Any]:
    has_words = re.fullmatch(r"[^\\]*[^\W\d_]{2}[^\\]*", text)
    return list(parse(rf"$\text{{{text}}}$")) if has_words else []


def _is_formula(text: str) -> bool:
    return not _NUMBER.fullmatch(text) and not _WORD.search(_COMMAND.sub("", text))


def _marked(part: re.Match[str]) -> str:
    formula = part[0].strip(".,;:!?")
    return part[0].replace(formula, f"${formula}$", 1) if _is_formula(formula) else part[0]


def _repeating(whole: str, fixed: str, period: str) -> str:
    top = int(whole + fixed + period) - int("0" + whole + fixed)
    return rf"\frac{{{top}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"
