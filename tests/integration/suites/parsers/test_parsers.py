"""Our parsers of tool calls beside the recorded verdicts of SGLang's and vLLM's, and new ones."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from rollout.gateway.prompt.answer import answer_parser
from tests.suites.parsers.__main__ import RECORDED, faults, recorded_questions
from tests.suites.parsers.answers import FORMATS, asked
from tests.suites.parsers.differences import is_right
from tests.suites.parsers.verdicts import JUDGES, PYTHON, by_judge, ours


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("name", FORMATS)
def test_verdicts_are_those_of_the_judges(name: str, judge: str) -> None:
    """But for what is listed, with its reason."""
    verdicts = json.loads(RECORDED.read_text("utf-8"))[judge][name]
    assert faults(judge, recorded_questions(name), verdicts, Counter()) == []


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_as_they_were_written(name: str) -> None:
    """All of an undamaged answer."""
    questions = list(asked(name, 40, 0, 2))
    assert [each for each in questions if not is_right(each, ours(each))] == []
    assert sum(bool(each.right) for each in questions) > 10


def test_a_wrong_parser_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: arguments by the name of parameters are lost, as before."""

    def only_arguments(function: Any) -> tuple[Any, Any]:
        return function.get("name"), function.get("arguments", {})

    monkeypatch.setattr(answer_parser, "_name_and_arguments", only_arguments)
    verdicts = json.loads(RECORDED.read_text("utf-8"))["sglang"]["hermes"]
    assert faults("sglang", recorded_questions("hermes"), verdicts, Counter())


@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-parsers: `make test-parsers` makes it")
def test_recorded_verdicts_are_the_judges() -> None:
    """Where their environment is installed."""
    recorded = json.loads(RECORDED.read_text("utf-8"))
    for judge in JUDGES:
        assert by_judge(judge, recorded_questions("hermes")) == recorded[judge]["hermes"]
