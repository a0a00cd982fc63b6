"""One suite for every kind of source."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from seamflow.client.turn import Task

from services.chassis.errors import ConfigError
from services.dataloader.config import DataloaderConfig
from services.lib.tasks.sources import Source, open_source
from services.lib.tasks.sources.environment import EnvironmentSource
from tests.lib.dataloader.support import numbered, sums, write_jsonl

Make = Callable[..., Source]


def _jsonl(folder: Path, **order: Any) -> Source:
    return open_source(write_jsonl(folder / "t.jsonl", numbered(23)), **order)


def _parquet(folder: Path, **order: Any) -> Source:
    table = pyarrow.Table.from_pylist(numbered(23))
    parquet.write_table(table, folder / "t.parquet", row_group_size=5)
    return open_source(str(folder / "t.parquet"), **order)


def _hugging_face(folder: Path, **order: Any) -> Source:
    (folder / "dataset").mkdir(exist_ok=True)
    write_jsonl(folder / "dataset" / "train.jsonl", numbered(23))
    return open_source(f"hf://{folder / 'dataset'}?split=train", **order)


def _environment(folder: Path, **order: Any) -> Source:
    tasks = [Task(task_id=row["task_id"], payload=row["payload"]) for row in numbered(23)]
    return EnvironmentSource("127.0.0.1:1", tasks, **order)


SOURCES = [_jsonl, _parquet, _hugging_face, _environment]


def ids(source: Source, epoch: int = 0, start: int = 0) -> list[str]:
    """Names of the tasks of an epoch."""
    return [row.values["task_id"] for row in source.rows(epoch, start)]


@pytest.mark.parametrize("make", SOURCES)
def test_unshuffled_tasks_come_in_file_order(tmp_path: Path, make: Make) -> None:
    """Every epoch reads the file from top to bottom."""
    source = make(tmp_path, shuffle=False, seed=0)
    assert ids(source) == ids(source, epoch=1) == [row["task_id"] for row in numbered(23)]


@pytest.mark.parametrize("make", SOURCES)
def test_shuffled_tasks_come_once_an_epoch(tmp_path: Path, make: Make) -> None:
    """Each epoch has another order of the same tasks; seed and epoch decide it."""
    source = make(tmp_path, shuffle=True, seed=3)
    assert ids(source) == ids(make(tmp_path, shuffle=True, seed=3))
    assert sorted(ids(source)) == sorted(ids(source, epoch=1))
    orders = [ids(source), ids(source, 1), ids(make(tmp_path, shuffle=True, seed=4))]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("make", SOURCES)
def test_any_place_can_be_resumed(tmp_path: Path, make: Make, shuffle: bool) -> None:
    """Starting at a place gives what the whole epoch has from there on."""
    source = make(tmp_path, shuffle=shuffle, seed=1)
    whole = ids(source, epoch=2)
    for start in (0, 1, 5, 13, 22, 23):
        assert ids(source, epoch=2, start=start) == whole[start:]


@pytest.mark.parametrize("make", SOURCES)
def test_indices_name_rows_not_places(tmp_path: Path, make: Make) -> None:
    """A row has the same index in whatever order it comes."""
    for row in make(tmp_path, shuffle=True, seed=1).rows(0, 0):
        assert row.values["task_id"] == f"t{row.index}"


@pytest.mark.parametrize("make", [_jsonl, _parquet, _hugging_face])
def test_a_copied_or_touched_data_set_has_the_same_content(tmp_path: Path, make: Make) -> None:
    """The digest is of the content; two swapped rows, or another one of equal size, change it."""
    (tmp_path / "there").mkdir()
    there = tmp_path / "there"
    content = make(there, shuffle=False, seed=0).content
    shutil.copytree(there, tmp_path / "copy")
    for file in (tmp_path / "copy").rglob("*.*"):
        os.utime(file, (1, 1))
    assert make(tmp_path / "copy", shuffle=True, seed=1).content == content


_NUMBERED = numbered


def _swapped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rows[1], rows[0], *rows[2:]]


def _other(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**rows[0], "payload": {"question": "9 + 1"}}, *rows[1:]]


@pytest.mark.parametrize("change", [_swapped, _other])
@pytest.mark.parametrize("make", SOURCES)
def test_another_data_set_of_equal_size_has_another_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Make, change: Callable[..., Any]
) -> None:
    """Where release 0.2 saw no difference in a file, the content has one."""
    before = make(tmp_path, shuffle=False, seed=0)
    was = before.content, before.fingerprint
    monkeypatch.setattr(f"{__name__}.numbered", lambda count: change(_NUMBERED(count)))
    after = make(tmp_path, shuffle=False, seed=0)
    assert after.content != was[0]
    if make is _jsonl:
        assert after.fingerprint == was[1]


def test_a_plus_joins_splits_of_a_dataset(tmp_path: Path) -> None:
    """As `datasets` reads it; in a part of a split a percent sign stays too."""
    for name, count in (("train", 4), ("test", 3)):
        write_jsonl(tmp_path / f"{name}.jsonl", numbered(count))
    for split, right in (("train+test", 7), ("test", 3), ("train[:50%25]+test", 5)):
        source = open_source(f"hf://{tmp_path}?split={split}", shuffle=False, seed=0)
        assert len(ids(source)) == right


def test_a_dataset_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    """The message names the setting, the dataset and what is wrong."""
    write_jsonl(tmp_path / "train.jsonl", numbered(2))
    for tasks, problem in (
        (f"hf://{tmp_path}?split=nowhere", "nowhere"),
        (f"hf://{tmp_path}?spilt=train", "option 'spilt'"),
        ("hf://", "no name"),
    ):
        with pytest.raises(ConfigError, match="tasks 'hf://") as raised:
            open_source(tasks, shuffle=False, seed=0)
        assert problem in str(raised.value)


def test_only_an_environments_tasks_can_be_held_out() -> None:
    """A file is split by hand."""
    with pytest.raises(ValueError, match=r"num_heldout is 2 and tasks is 't\.jsonl'"):
        DataloaderConfig(run_id="run", tasks="t.jsonl", num_heldout=2)


def test_a_function_gets_seed_and_epoch() -> None:
    """A generator's tasks are a function of both; a resume skips what was done."""
    source = open_source(f"{sums.__module__}:sums", shuffle=False, seed=7)
    rows = list(source.rows(2, 3))
    assert [row.values["task_id"] for row in rows] == ["sum-3", "sum-4"]
    assert rows[0].values == {"task_id": "sum-3", "payload": {"a": 7, "b": 2}}


def test_a_function_that_raises_is_named() -> None:
    """With what it raised."""
    source = open_source("tests.lib.dataloader.support:breaks", shuffle=False, seed=0)
    with pytest.raises(ConfigError, match=r"support:breaks raised KeyError\('x'\) in epoch 3"):
        list(source.rows(3, 0))


@pytest.mark.parametrize(
    ("line", "cure"),
    [('{"task_id": ', "not JSON"), ("[1]", "is a list"), ("\udcff", "not JSON")],
)
def test_an_error_names_the_invalid_line(tmp_path: Path, line: str, cure: str) -> None:
    """File, line and cure; blank lines count as lines and are no tasks."""
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"task_id": "a"}}\n\n{line}\n', errors="surrogateescape")
    rows = open_source(str(path), shuffle=False, seed=0).rows(0, 0)
    assert next(rows).values == {"task_id": "a"}
    assert re.search(r"t\.jsonl line 3 .*" + cure, next(rows).problem)


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ("t.csv", r"\.jsonl or \.parquet"),
        ("absent.jsonl", "does not exist in .*did you mean empty.jsonl"),
        ("empty.jsonl", "holds no task"),
        ("text.parquet", "not a Parquet file"),
        ("no.such.module:tasks", "No module named"),
        ("tests.lib.dataloader.support:sum", "did you mean 'sums'"),
    ],
)
def test_an_unreadable_source_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: str, expected: str
) -> None:
    """Every mistake in `tasks` names itself."""
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "text.parquet").write_text("text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=expected):
        open_source(tasks, shuffle=False, seed=0)


def test_shuffling_a_function_is_refused() -> None:
    """A knob without effect is an error."""
    with pytest.raises(ConfigError, match="shuffle"):
        open_source("tests.lib.dataloader.support:sums", shuffle=True, seed=0)
