"""Data sets as they are kept: copied, touched, edited; values of Parquet; splits of a dataset."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from hypothesis import strategies
from pyarrow import parquet

from services.chassis.errors import ConfigError
from services.dataloader.config import DataloaderConfig
from services.dataloader.loader import Position, PositionFile
from services.lib.tasks.sources import Source, open_source
from tests.suites.field.kind import Kind

Rows = list[dict[str, Any]]


def _lines(rows: Rows, folder: Path) -> str:
    (folder / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / "t.jsonl")


def _table(rows: Rows, folder: Path) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "t.parquet")
    return str(folder / "t.parquet")


def _dataset(rows: Rows, folder: Path) -> str:
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    return f"hf://{folder / 'data'}"


FORMS: Mapping[str, Callable[[Rows, Path], str]] = {
    "jsonl": _lines,
    "parquet": _table,
    "hf": _dataset,
}


@dataclass(frozen=True, slots=True)
class Change:
    """A data set, and what it is at the resume."""

    form: str
    """Of FORMS."""
    before: Rows
    after: Rows
    """The same rows: it was copied and touched."""


def _opened(tasks: str) -> Source:
    return open_source(tasks, shuffle=False, seed=0)


def _check_change(change: Change) -> None:
    """A resume goes on in the same data set and in no other, by the file of the position."""
    with tempfile.TemporaryDirectory() as folder:
        there, here = Path(folder, "there"), Path(folder, "here")
        for place in (there, here):
            place.mkdir()
        source = _opened(FORMS[change.form](change.before, there))
        kept = PositionFile(Path(folder, "state.json"))
        kept.save(Position(source=source.fingerprint, content=source.content, place=1))
        shutil.rmtree(there)
        resumed = _opened(FORMS[change.form](change.after, here))
        for file in here.rglob("*.*"):
            os.utime(file, (1, 1))
        start = Position(source=resumed.fingerprint, content=resumed.content)
        try:
            position = kept.load(start)
        except ConfigError as error:
            assert change.before != change.after, str(error)
            assert "belongs to other tasks" in str(error)
        else:
            assert (change.before == change.after, position.place) == (True, 1)


def _check_value(case: tuple[pyarrow.DataType, Any, Any]) -> None:
    """A value of a column, and within a list and a struct, is what JSON has for it."""
    kind, given, right = case
    nested = pyarrow.struct([("own", kind), ("of_others", pyarrow.string())])
    columns = {
        "alone": pyarrow.array([given], kind),
        "listed": pyarrow.array([[given]], pyarrow.list_(kind)),
        "nested": pyarrow.array([{"own": given}], nested),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.parquet")
        parquet.write_table(pyarrow.table(columns), path)
        (row,) = _opened(str(path)).rows(0, 0)
    assert row.values == {"alone": right, "listed": [right], "nested": {"own": right}}, row
    assert json.loads(json.dumps(dict(row.values))) == row.values


def _check_split(case: tuple[str, Sequence[int]]) -> None:
    """Rows of a dataset of which `train` has 0 to 9 and `test` 10 to 13."""
    split, right = case
    with tempfile.TemporaryDirectory() as folder:
        for name, numbers in (("train", range(10)), ("test", range(10, 14))):
            text = "".join(f'{{"number": {number}}}\n' for number in numbers)
            Path(folder, f"{name}.jsonl").write_text(text)
        tasks = f"hf://{folder}?split={split}"
        DataloaderConfig(run_id="run", tasks=tasks)
        found = [row.values["number"] for row in _opened(tasks).rows(0, 0)]
    assert found == list(right), found


@strategies.composite
def _changes(draw: strategies.DrawFn) -> Change:
    """A copy, two rows in each other's place, or one number that is another of equal length."""
    form = draw(strategies.sampled_from(["jsonl", "parquet"]))
    numbers = draw(strategies.lists(strategies.integers(10, 99), min_size=2, max_size=8))
    before: Rows = [{"task_id": f"t{i}", "x": number} for i, number in enumerate(numbers)]
    after: Rows = [dict(row) for row in before]
    change = draw(strategies.sampled_from(["copy", "swap", "edit"]))
    if change == "swap":
        place = draw(strategies.integers(0, len(after) - 2))
        after[place], after[place + 1] = after[place + 1], after[place]
    if change == "edit":
        after[0]["x"] = 10 + (after[0]["x"] - 9) % 90
    return Change(form, before, after)


FLOAT = pyarrow.float32()
ROWS = [{"task_id": "a", "x": 1}, {"task_id": "b", "x": 2}]
VALUES = [
    (FLOAT, 0.1, 0.1),
    (FLOAT, 16777216.0, 16777216.0),
    (pyarrow.map_(pyarrow.string(), FLOAT), [("k", 0.3)], {"k": 0.3}),
    (pyarrow.map_(pyarrow.string(), pyarrow.string()), [], {}),
    (pyarrow.struct([("a", FLOAT), ("b", pyarrow.int8())]), {"a": 0.7}, {"a": 0.7}),
    (pyarrow.large_list(FLOAT), [0.2], [0.2]),
    (pyarrow.large_string(), "é", "é"),
    (pyarrow.int64(), 2**62, 2**62),
]


@strategies.composite
def _decimals(draw: strategies.DrawFn) -> tuple[pyarrow.DataType, Any, Any]:
    """A number that was written with up to six digits, which float32 keeps apart."""
    text = f"{draw(strategies.integers(-999999, 999999))}e{draw(strategies.integers(-9, 9))}"
    number = float(text)
    assert float(str(np.float32(number))) == number  # numpy's shortest form, the other judge
    return FLOAT, number, number


KINDS = (
    Kind(
        name="changes of data sets",
        check=_check_change,
        examples=[
            Change(form, ROWS, after)
            for form in FORMS
            for after in (ROWS, ROWS[::-1], [ROWS[0], {"task_id": "b", "x": 3}])
        ],
        generated=_changes(),
        short=15,
        long=300,
    ),
    Kind(
        name="values of Parquet",
        check=_check_value,
        examples=VALUES,
        generated=_decimals(),
        short=15,
    ),
    Kind(
        name="splits of datasets",
        check=_check_split,
        examples=[
            ("train+test", range(14)),
            ("test+train", [*range(10, 14), *range(10)]),
            ("test", range(10, 14)),
            ("train[:2]%2Btest[2:]", [0, 1, 12, 13]),
            ("train[8:]+test[:1]", [8, 9, 10]),
            ("train[50%:]", range(5, 10)),
        ],
    ),
)
