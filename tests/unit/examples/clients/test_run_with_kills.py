"""What the training run of foreign agents counts, and what it calls wrong."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.clients.foreign_agents import Said, read_summary
from bench.clients.run_with_kills import Outcome, TokensReceived
from services.launcher.report.summary import Audit

RIGHT = Said(resumed=1, reason="INVALID_FIELD", fields=("run_id",), text="run_id is empty")


def outcome(audit: Audit, said: Said) -> Outcome:
    """A run of one client."""
    return Outcome(audit=audit, kills=Counter(), stored=[], steps=[], said={"node": said})


def test_a_run_without_fault_has_no_problems() -> None:
    """Tokens that were received are no problem."""
    assert outcome(Audit(num_received=9), RIGHT).problems() == []


@pytest.mark.parametrize("fault", ["num_lost", "num_duplicated", "num_wrong_version"])
def test_a_token_that_differs_is_a_problem(fault: str) -> None:
    """Negative control."""
    assert len(outcome(Audit(**{fault: 1}), RIGHT).problems()) == 1


@pytest.mark.parametrize(
    "wrong", [{"resumed": 0}, {"reason": ""}, {"fields": ()}, {"text": "refused"}]
)
def test_a_client_that_misses_a_part_is_a_problem(wrong: dict[str, object]) -> None:
    """Negative control."""
    assert len(outcome(Audit(), replace(RIGHT, **wrong)).problems()) == 1  # type: ignore[arg-type]


def test_the_last_line_of_a_client_is_its_summary(tmp_path: Path) -> None:
    """What comes before it, and what does not look like it, is not."""
    log = tmp_path / "agent.log"
    refusal = {"reason": "INVALID_FIELD", "fields": ["run_id"], "text": "run_id is empty"}
    log.write_text(f"retrying\n{json.dumps({'resumed': 1, 'refusal': refusal})}\n")
    assert read_summary(log) == RIGHT
    for text in ("", "retrying\n", "{}\n", '{"resumed": 1, "refusal": null}\n'):
        log.write_text(text)
        with pytest.raises(ValueError, match=r"agent\.log ends with no summary"):
            read_summary(log)


def test_a_growing_log_is_counted_line_by_line(tmp_path: Path) -> None:
    """A line that is half written counts once it is whole."""
    log = tmp_path / "received.jsonl"
    line = json.dumps({"token_ids": [1, 2, 3]})
    log.write_text(f"{line}\n{line[:9]}")
    received = TokensReceived(log)
    assert received.update() == 3
    log.write_text(f"{line}\n{line}\n")
    assert received.update() == received.update() == 6
