"""The trainer's metrics, as they grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.console.sources.step_table import StepTable


def line(step: int, **values: Any) -> str:
    """A line of metrics.jsonl."""
    return json.dumps({"step": step, **values}) + "\n"


def test_columns_have_one_value_for_each_step(tmp_path: Path) -> None:
    """Nested numbers have a dot; a metric that comes later, or is no number, is None before."""
    file = tmp_path / "metrics.jsonl"
    file.write_text(line(1, loss=2.0, seconds={"wait": 0.5}) + line(2, loss=float("nan"), new=1))
    table = StepTable(file)
    table.read()
    assert table.steps == [1, 2]
    assert table.names == ["loss", "new", "seconds.wait"]
    assert table.column("loss") == [2.0, None]
    assert table.column("new") == [None, 1]
    assert table.column("unknown") == [None, None]
    assert table.row(1) == {"loss": 2.0, "seconds.wait": 0.5}
    assert table.row(9) == {}


def test_only_whole_new_lines_are_read(tmp_path: Path) -> None:
    """A line in writing is read when it is whole."""
    file, table = tmp_path / "metrics.jsonl", StepTable(tmp_path / "metrics.jsonl")
    table.read()
    assert table.steps == [] and not table.has_file()
    file.write_text(line(1) + line(2)[:5])
    table.read()
    assert table.steps == [1]
    file.write_text(line(1) + line(2))
    table.read()
    assert table.steps == [1, 2]


def test_a_repeated_step_undoes_what_followed_it(tmp_path: Path) -> None:
    """After a crash the trainer resumes from its checkpoint."""
    file, table = tmp_path / "metrics.jsonl", StepTable(tmp_path / "metrics.jsonl")
    file.write_text(line(1, a=1) + line(2, a=2) + line(3, a=3) + line(2, a=20))
    table.read()
    assert (table.steps, table.column("a")) == ([1, 2], [1, 20])


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    """A shorter one is another one."""
    file, table = tmp_path / "metrics.jsonl", StepTable(tmp_path / "metrics.jsonl")
    file.write_text(line(1, a=1) + line(2, a=2))
    table.read()
    file.write_text(line(1, b=1))
    table.read()
    assert (table.steps, table.names) == ([1], ["b"])


def test_a_list_reads_the_last_line_alone(tmp_path: Path) -> None:
    """Of a long run too; one in writing does not count."""
    file = tmp_path / "metrics.jsonl"
    table = StepTable(file)
    assert table.newest() == {}
    file.write_text("".join(line(i, loss=i, padding="x" * 500) for i in range(1, 400)) + '{"st')
    assert table.newest() == {"step": 399, "loss": 399}
    assert table.steps == []
