"""Where our verdicts differ from a judge's, with reasons; any other difference is a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.suites.parsers.answers import Asked
from tests.suites.parsers.verdicts import Verdict, same_calls, same_content

_MARKERS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A kind of difference that is wanted."""

    name: str
    reason: str
    applies: Callable[[str, Asked, Verdict, Verdict], bool]
    """Of judge, question, our verdict and the judge's."""


def _is_left_as_text(judge: str, asked: Asked, ours: Verdict, theirs: Verdict) -> bool:
    return asked.right is None and bool(ours["parse_error"]) and _is_whole_text(asked, ours)


def _is_whole_text(asked: Asked, ours: Verdict) -> bool:
    return not ours["calls"] and ours["content"].strip() == asked.text.strip()


def _ends_in_marker(judge: str, asked: Asked, ours: Verdict, theirs: Verdict) -> bool:
    if asked.right is not None or ours["parse_error"] or not same_calls(ours, theirs):
        return False
    content, shown = _bare(ours["content"]), _bare(str(theirs.get("content", "")))
    rest = content.removeprefix(shown)
    return content.startswith(shown) and _bare(asked.text).endswith(rest)


def _bare(text: str) -> str:
    for marker in _MARKERS:
        text = text.replace(marker, "")
    return "".join(text.split())


def _lacks_its_end(judge: str, asked: Asked, ours: Verdict, theirs: Verdict) -> bool:
    number = len(theirs.get("calls", ()))
    more = asked.right is None and not ours["parse_error"] and len(ours["calls"]) == number + 1
    return more and same_calls({"calls": ours["calls"][:number]}, theirs)


def _has_no_name(judge: str, asked: Asked, ours: Verdict, theirs: Verdict) -> bool:
    return any(call[0] is None for call in theirs.get("calls", ())) and _is_whole_text(asked, ours)


def _has_no_space(judge: str, asked: Asked, ours: Verdict, theirs: Verdict) -> bool:
    return (judge, asked.format) == ("sglang", "mistral") and "[TOOL_CALLS][" in asked.text


def _reads_no_parameters(judge: str, asked: Asked, ours: Verdict, theirs: Verdict) -> bool:
    return judge == "vllm" and asked.format == "hermes" and '"parameters"' in asked.text


def _has_several(judge: str, asked: Asked, ours: Verdict, theirs: Verdict) -> bool:
    several = asked.format == "llama3" and len(asked.right or ()) > 1
    return several and bool(ours["parse_error"]) and _is_whole_text(asked, ours)


def _has_mistral_parameters(judge: str, asked: Asked, ours: Verdict, theirs: Verdict) -> bool:
    named = asked.format == "mistral" and '"parameters"' in asked.text
    return named and bool(ours["parse_error"]) and _is_whole_text(asked, ours)


LISTED = (
    Difference(
        "broken",
        "A call that is damaged or cut makes the whole answer content, with a parse_error that "
        "says why; the judge drops the markup, or gives the calls before it.",
        _is_left_as_text,
    ),
    Difference(
        "marker",
        "A marker that the end of the answer has cut is content; the judge drops it.",
        _ends_in_marker,
    ),
    Difference(
        "end",
        "A call whose arguments are whole counts although the marker after it was cut.",
        _lacks_its_end,
    ),
    Difference(
        "name",
        "SGLang gives an object without a name as a call; here it is content.",
        _has_no_name,
    ),
    Difference(
        "space",
        "SGLang looks for a space after Mistral's marker; Mistral's own templates write none.",
        _has_no_space,
    ),
    Difference(
        "parameters",
        "vLLM's parser of this format does not know arguments by the name of parameters.",
        _reads_no_parameters,
    ),
    Difference(
        "several",
        "Meta's format has one call for each answer; several are content, with a parse_error.",
        _has_several,
    ),
    Difference(
        "mistral parameters",
        "Mistral's format calls them arguments; parameters are content, with a parse_error.",
        _has_mistral_parameters,
    ),
)


def differs(ours: Verdict, theirs: Verdict) -> bool:
    """Whether two verdicts are not the same."""
    return not (same_calls(ours, theirs) and same_content(ours, theirs))


def listed(judge: str, asked: Asked, ours: Verdict, theirs: Verdict) -> str:
    """Name of the first kind that a difference is of; empty: of none."""
    return next((d.name for d in LISTED if d.applies(judge, asked, ours, theirs)), "")


def is_right(asked: Asked, ours: Verdict) -> bool:
    """Whether we have the calls of an undamaged answer, or it is of a kind that is listed."""
    if asked.right is None or same_calls(ours, {"calls": [list(call) for call in asked.right]}):
        return True
    return bool(listed("", asked, ours, ours))
