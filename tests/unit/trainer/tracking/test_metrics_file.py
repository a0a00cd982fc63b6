"""The metrics file tells of each step when it was made, also after a crash repeated it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.tracking.step_record import MetricsFile, StepRecord


def made(step: int, version: int, *sample_ids: str) -> StepRecord:
    """A finished step."""
    record = StepRecord(step, step - 1)
    record._sample_ids = list(sample_ids)
    record.published(version)
    return record


def lines(file: Path) -> dict[int, dict[str, Any]]:
    """By step."""
    return {line["step"]: line for line in map(json.loads, file.read_text().splitlines())}


def test_a_repeated_step_keeps_its_times_and_its_version(tmp_path: Path) -> None:
    """All would have one time, and the newest version of before the crash, which is not theirs."""
    file = tmp_path / "metrics.jsonl"
    first = MetricsFile(file)
    for step in (1, 2, 3):
        first.append(made(step, step, f"s{step}"))
    before = lines(file)
    resumed = MetricsFile(file)
    resumed.begin(1, {})
    assert list(lines(file)) == [1]
    for step in (2, 3, 4):
        resumed.append(made(step, 3 if step < 4 else 4, f"s{step}"))
    after = lines(file)
    assert [after[step]["time"] for step in (1, 2, 3)] == [before[s]["time"] for s in (1, 2, 3)]
    assert after[4]["time"] > before[3]["time"]
    assert [after[step]["weight_version"] for step in after] == [1, 2, 3, 4]


def test_a_step_with_other_samples_is_another_one(tmp_path: Path) -> None:
    """*Control*: the crash undid the first one."""
    file = tmp_path / "metrics.jsonl"
    MetricsFile(file).append(made(1, 1, "s1"))
    before = lines(file)[1]
    resumed = MetricsFile(file)
    resumed.begin(0, {})
    resumed.append(made(1, 2, "other"))
    assert lines(file)[1]["time"] > before["time"]
    assert lines(file)[1]["weight_version"] == 2
