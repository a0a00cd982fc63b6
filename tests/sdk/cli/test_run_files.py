"""Files with a JSON object per line, as killed processes leave them."""

from __future__ import annotations

import json
from pathlib import Path

from seamflow.cli.run_files import read_steps


def test_a_repeated_step_counts_once_and_a_half_line_not_at_all(tmp_path: Path) -> None:
    """After a crash the trainer repeats a step; its last line stands."""
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 3.0}]
    file.write_text("[1]\n" + "\n".join(map(json.dumps, lines)) + '\n{"step": 3, "lo')
    assert [step["loss"] for step in read_steps(file)] == [1.0, 3.0]


def test_a_missing_file_has_no_steps(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "metrics.jsonl") == []
