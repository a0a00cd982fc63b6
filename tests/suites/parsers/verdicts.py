"""Our verdicts on answers, those of the judges, and where they differ."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rollout.gateway.prompt.answer.model_families import BUILT_IN
from rollout.gateway.prompt.answer.response_format import ResponseFormat
from tests.suites.parsers.answers import OURS, TOOLS, Asked
from tools.provenance import ROOT

JUDGES = ("sglang", "vllm")
PYTHON = ROOT / ".venv-parsers" / "bin" / "python"
"""Of the environment of the judges."""
_JUDGE = Path(__file__).with_name("judge.py")

Verdict = Mapping[str, Any]
"""{"calls": [[name, arguments]], "content"}; of a judge also {"error"}, ours also "parse_error"."""


def ours(asked: Asked) -> Verdict:
    """Our parser's verdict."""
    answer = _format(OURS.get(asked.format, asked.format)).parse(asked.text, "", TOOLS)
    calls = [call["function"] for call in answer.message.get("tool_calls", ())]
    return {
        "calls": [[call["name"], call["arguments"]] for call in calls],
        "content": answer.message["content"],
        "parse_error": answer.error,
    }


@cache
def _format(name: str) -> ResponseFormat:
    template = {"start_anchor_pattern": r"\A", "fields": BUILT_IN[name]}
    return ResponseFormat(template, name=name)


def by_judge(judge: str, questions: Sequence[Asked]) -> list[Verdict | None]:
    """A judge's verdicts; None: it does not know the format."""
    lines = [
        json.dumps({"format": each.format, "text": each.text, "tools": TOOLS}) for each in questions
    ]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as given:
        given.write("\n".join(lines))
        given.seek(0)
        command = [str(PYTHON), str(_JUDGE), judge]
        done = subprocess.run(command, stdin=given, stdout=subprocess.PIPE, text=True, check=True)
    verdicts: list[Verdict | None] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(verdicts) == len(questions)
    return verdicts


def same_calls(one: Verdict, other: Verdict) -> bool:
    """Whether both have the same calls in the same order."""
    return _plain(one.get("calls")) == _plain(other.get("calls"))


def same_content(one: Verdict, other: Verdict) -> bool:
    """Whether both have the same content; white space around it is each server's own."""
    return str(one.get("content", "")).strip() == str(other.get("content", "")).strip()


def _plain(calls: Any) -> str:
    return json.dumps(calls, sort_keys=True)
