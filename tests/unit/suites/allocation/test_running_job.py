"""What the records of a job that has ended say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.suites.allocation.running_job import RunningJob, conserved

SUMMARY = {
    "optimizer_steps": 2,
    "tokens_received_by_agents": 40,
    "tokens_lost": 0,
    "tokens_with_wrong_version": 0,
    "tokens_duplicated": 0,
    "failed_rollouts": 0,
    "process_restarts": 1,
}
TRAINED = [{"step": 1, "sample_ids": ["a", "b"]}, {"step": 2, "sample_ids": ["c"]}]
MUST_BE_0 = (
    "tokens_lost",
    "tokens_duplicated",
    "samples_trained_twice",
    "steps_lost_or_doubled",
    "rollouts_failed",
)


def job(folder: Path, trained: list[dict[str, Any]], **summary: int) -> RunningJob:
    """One that has left these records."""
    found = RunningJob(launcher=None, folder=folder)  # type: ignore[arg-type]
    found.run.mkdir(parents=True)
    (found.run / "summary.json").write_text(json.dumps({**SUMMARY, **summary}))
    text = "".join(f"{json.dumps(line)}\n" for line in trained)
    (found.run / "trained_samples.jsonl").write_text(text)
    return found


def test_a_job_that_lost_nothing_has_zeros(tmp_path: Path) -> None:
    """And says how much it was."""
    figures = conserved(job(tmp_path, TRAINED))
    assert [figures[name] for name in MUST_BE_0] == [0] * len(MUST_BE_0)
    assert (figures["samples_trained"], figures["optimizer_steps"]) == (3, 2)


@pytest.mark.parametrize(
    ("trained", "summary", "name"),
    [
        ([*TRAINED, {"step": 2, "sample_ids": ["d"]}], {}, "steps_lost_or_doubled"),
        (TRAINED[1:], {}, "steps_lost_or_doubled"),
        ([TRAINED[0], {"step": 2, "sample_ids": ["a"]}], {}, "samples_trained_twice"),
        (TRAINED, {"tokens_lost": 1}, "tokens_lost"),
        (TRAINED, {"tokens_with_wrong_version": 1}, "tokens_lost"),
        (TRAINED, {"tokens_duplicated": 1}, "tokens_duplicated"),
        (TRAINED, {"failed_rollouts": 1}, "rollouts_failed"),
    ],
)
def test_what_is_lost_or_doubled_is_counted(
    tmp_path: Path, trained: list[dict[str, Any]], summary: dict[str, int], name: str
) -> None:
    """Negative controls: one fault each, and only it is found."""
    figures = conserved(job(tmp_path, trained, **summary))
    assert figures[name] > 0
    assert [other for other in MUST_BE_0 if figures[other] and other != name] == []
