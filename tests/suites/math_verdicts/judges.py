"""Who says whether an answer is right: ours, math-verify alone, and the rewards of TRL and open-r1.

Those of TRL and open-r1 are math-verify with other settings; they skip a task whose expected answer
they cannot read, which counts as a wrong 0 here.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

from services.tool_loop import math_answer
from tests.suites.math_verdicts.pairs import Pair


def ours(pair: Pair) -> bool:
    """The reward "math" with the pattern of the pair."""
    said = _extracted(pair)
    if said is None or math_answer.is_cut_off(pair.text):
        return False
    return math_answer.is_right([pair.gold], said)


def math_verify_alone(pair: Pair) -> bool:
    """In one line, after the pattern."""
    said = _extracted(pair)
    return said is not None and bool(verify(parse(pair.gold), parse(said)))


def trl(pair: Pair) -> bool:
    """`trl.rewards.accuracy_reward` of TRL 1.16."""
    return _boxed_latex(pair, NormalizationConfig(units=True), {})


def open_r1(pair: Pair) -> bool:
    """`accuracy_reward` of open-r1."""
    normalization = NormalizationConfig(
        nits=False,
        malformed_operators=False,
        basic_latex=True,
        boxed="all",
        units=True,
    )
    return _boxed_latex(pair, normalization, {"extraction_mode": "first_match"})


JUDGES: dict[str, Callable[[Pair], bool]] = {
    "ours": ours,
    "math_verify": math_verify_alone,
    "trl": trl,
    "open_r1": open_r1,
}


def _boxed_latex(pair: Pair, normalization: object, of_gold: dict[str, str]) -> bool:
    gold = parse(pair.gold, **of_gold)
    config = LatexExtractionConfig(
        normalization_config=normalization,
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    found = parse(pair.text, extraction_config=[config], extraction_mode="first_match")
    return bool(gold) and bool(verify(gold, found))


def _extracted(pair: Pair) -> str | None:
    if not pair.pattern:
        return pair.text
    found = re.findall(pair.pattern, pair.text)
    return found[-1] if found else None
