"""Files with a JSON object per line, as killed processes leave them."""

from __future__ import annotations

import json
from pathlib import Path

from seamflow.inspect.run_files import GrowingSteps, read_steps


def test_a_repeated_step_counts_once_and_a_half_line_not_at_all(tmp_path: Path) -> None:
    """After a crash the trainer repeats a step; its last line stands."""
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 3.0}]
    file.write_text("[1]\n" + "\n".join(map(json.dumps, lines)) + '\n{"step": 3, "lo')
    assert [step["loss"] for step in read_steps(file)] == [1.0, 3.0]


def test_a_missing_file_has_no_steps(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "metrics.jsonl") == []


def test_steps_that_are_added_are_read_once(tmp_path: Path) -> None:
    """However they are cut, and also those of a trainer that repeats a step."""
    file = tmp_path / "metrics.jsonl"
    steps = GrowingSteps(file)
    assert steps.read() == []
    text = "".join(f'{{"step": {i}, "reward_mean": {i}, "other": 1}}\n' for i in (1, 2, 2, 3))
    for end in range(0, len(text) + 1, 7):
        file.write_text(text[:end])
        assert [each["step"] for each in steps.read()] == [
            each["step"] for each in read_steps(file)
        ][: text[:end].count("\n")]
    file.write_text('{"step": 9}\n')
    assert steps.read() == [{"step": 9}]


def test_old_steps_keep_only_what_rules_look_at(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = (f'{{"step": {i}, "reward_mean": {i}, "other": 1}}\n' for i in range(1000))
    file.write_text("".join(lines))
    found = GrowingSteps(file).read()
    assert [each["reward_mean"] for each in found] == [*range(1000)]
    assert sum("other" in each for each in found) == 64
